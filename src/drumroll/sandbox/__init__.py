"""Running Python that a model wrote, without trusting it."""

from drumroll.sandbox.host import Sandbox
from drumroll.sandbox.outcome import Ending, Examination, Limits, ScriptRun

__all__ = ["Ending", "Examination", "Limits", "Sandbox", "ScriptRun"]
