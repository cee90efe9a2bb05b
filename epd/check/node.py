"""What both nodes of the checker have: inputs, the mail between their actors, what they send."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from epd.check.setup import Setup
from epd.protocol.messages import Message

State = TypeVar("State")
Words = tuple[Any, ...]
"""A command and its arguments, as in a script."""
Mail = tuple[tuple[str, Words], ...]
"""(actor, (handler, arguments ..)), in the order in which it was told."""


class CheckedNode(ABC, Generic[State]):
    """`_on_<command>` takes an input; `_<handler>` takes mail. `name` is `prefill` or `encoder`."""

    def __init__(
        self, name: str, setup: Setup, sessions: tuple[int, ...], mail: Mail, flaws: tuple[str, ...]
    ) -> None:
        self._setup: Final = setup
        self._sessions = list(sessions)
        self._mail = list(mail)
        self._flaws = list(flaws)
        self._sent: list[tuple[int, Message]] = []
        self._mail_is_explored: Final = setup.mailboxes in {name, "both"}

    @abstractmethod
    def frozen(self) -> State: ...

    def react(self, words: Words) -> tuple[State, tuple[tuple[int, Message], ...]]:
        """One input, and (unless mailboxes are explored) all that follows from it inside of the node."""
        handler: Callable[..., None] = getattr(self, "_on_" + words[0].replace("-", "_"))
        handler(*words[1:])
        while self._mail and not self._mail_is_explored:
            self._turn(0)
        return self.frozen(), tuple(self._sent)

    def _tell(self, actor: str, *words: Any) -> None:
        self._mail.append((actor, words))

    def _on_turn(self, actor: str) -> None:
        self._turn(next(index for index, (to, _) in enumerate(self._mail) if to == actor))

    def _turn(self, index: int) -> None:
        _, words = self._mail.pop(index)
        handler: Callable[..., None] = getattr(self, "_" + words[0])
        handler(*words[1:])

    def _send(self, session: int, message: Message) -> None:
        if session in self._sessions:
            self._sent.append((session, message))
