"""Your own group filter: looks at the attempts at one task and says why they are not worth training on, or returns None.

plugins: [./examples/keep_hard_groups.py]
rollout: {filters: [{kind: keep_hard, max_solved: 0.5}]}
"""

from drumroll import Group, register


@register.group_filter("keep_hard")
def keep_hard(group: Group, *, max_solved: float = 0.75) -> str | None:
    """Rejects tasks that the policy solves in more than `max_solved` of its attempts."""
    solved = sum(sample.success is True for sample in group.samples) / len(group.samples)
    return f"more than {max_solved:.0%} solved" if solved > max_solved else None
