"""What a check of a trace found: which rule, where."""

from typing import NamedTuple


class Finding(NamedTuple):
    """`rule` is an invariant, `cell`, or `channel`; `step` counts the node's steps from 0."""

    rule: str
    node: str
    step: int
    kind: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.node} step {self.step}, {self.kind} {self.key}: {self.message}"
