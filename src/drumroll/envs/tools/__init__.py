"""Questions that a model answers with the help of tools.

env         the environment `tools`: calls in a reply → results
tool        what a tool is: `Tool`, `ToolBox`, `ToolError`; function: a plain function as a tool
calculator  python  search  mcp     the tools that come with drumroll
shared      what all episodes of a process share
"""

from drumroll.envs.tools.env import PlainForm, Tools
from drumroll.envs.tools.tool import Tool, ToolBox, ToolConfig, ToolError

__all__ = ["PlainForm", "Tool", "ToolBox", "ToolConfig", "ToolError", "Tools"]
