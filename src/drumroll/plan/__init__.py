"""AutoDeviceMapping: a pool of devices and a config become a plan, pure data, printable before anything starts.

    Pool (`pool`) + RunConfig ──make_plan (`mapping`, `request`, `cost`)──▶ Plan (`placement`) ──render (`render`)──▶ tables

Imports neither torch nor ray: a plan for a cluster of thousands of GPUs can be made on a laptop.
"""

from drumroll.plan.cost import Memory, Stage, parameter_count
from drumroll.plan.mapping import make_plan
from drumroll.plan.placement import Placement, Plan
from drumroll.plan.pool import Device, Kind, Node, Pool, gpu_label, local_pool, parse_pool

__all__ = [
    "Device",
    "Kind",
    "Memory",
    "Node",
    "Placement",
    "Plan",
    "Pool",
    "Stage",
    "gpu_label",
    "local_pool",
    "make_plan",
    "parameter_count",
    "parse_pool",
]
