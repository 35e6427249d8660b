"""The windows at the end of a fork: which branch wins, and whether the judge's choice is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from branching.tui.dialogs import AnswerScreen, Typed
from branching.tui.formatting import mark, plain


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One branch that may win."""

    branch_id: str
    label: str
    state: str
    facts: str
    """Turns, cost, the last message."""


@dataclass(frozen=True)
class Picked:
    """What a person chose: to merge a branch, or to look at it in an editor first."""

    branch_id: str
    opens: bool = False


class MergePicker(AnswerScreen[Picked | None]):
    """Chooses the winner by its number, or the one in front by Enter; `o` opens that one."""

    DEFAULT_CSS = """
    MergePicker { align: center middle; }
    MergePicker > Vertical {
        width: 95%; height: auto; max-height: 100%; border: solid $foreground;
        background: $background; padding: 0 1;
    }
    MergePicker OptionList { height: auto; padding: 0; }
    MergePicker OptionList, MergePicker OptionList:focus { border: none; }
    MergePicker .option-list--option-highlighted { text-style: reverse; }
    MergePicker #why { height: auto; max-height: 4; }
    """
    KEYS = "[1-9, enter] merge   [o] open in the editor   [escape] back"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "back"),
        Binding("o", "open", "open"),
    ]

    def __init__(
        self,
        choices: Sequence[Choice],
        why: str = "",
        proposed: str = "",
        typed: Typed | None = None,
    ) -> None:
        super().__init__(typed)
        self._choices = choices
        self._why = why
        ids = [choice.branch_id for choice in choices]
        self._first = ids.index(proposed) if proposed in ids else 0

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static("Merge: which branch wins?")
            yield Static(Text(plain(self._why)), id="why")
            yield OptionList(
                *(
                    Option(
                        Text(
                            f"{number} {mark(choice.state)} {choice.label}: "
                            f"{choice.state.replace('_', ' ')}{plain(choice.facts)}"
                        )
                    )
                    for number, choice in enumerate(self._choices, 1)
                )
            )
            yield self.answers

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = self._first

    def answer_widget(self) -> Widget:
        return self.query_one(OptionList)

    def on_key(self, event: events.Key) -> None:
        if event.key.isdecimal() and 1 <= int(event.key) <= len(self._choices):
            event.stop()
            self.dismiss(Picked(self._choices[int(event.key) - 1].branch_id))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(Picked(self._choices[event.option_index].branch_id))

    def action_open(self) -> None:
        index = self.query_one(OptionList).highlighted or 0
        self.dismiss(Picked(self._choices[index].branch_id, opens=True))


class Acceptance(AnswerScreen[str]):
    """The judge's choice: returns "accept", "diff", "override" or ""."""

    DEFAULT_CSS = """
    Acceptance { align: center middle; }
    Acceptance > Vertical {
        width: 90%; height: auto; max-height: 100%; border: solid $foreground;
        background: $background; padding: 0 1;
    }
    Acceptance VerticalScroll { height: auto; }
    """
    KEYS = "[enter] accept   [d] diff   [o] override   [escape] back"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "dismiss('accept')", "accept"),
        Binding("d", "dismiss('diff')", "diff"),
        Binding("o", "dismiss('override')", "override"),
        Binding("escape", "dismiss('')", "back"),
    ]

    def __init__(self, label: str, why: str, typed: Typed | None = None) -> None:
        super().__init__(typed)
        self._label = label
        self._why = why

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(f"The judge chose {self._label}", "bold"))
            with VerticalScroll(can_focus=False):
                yield Static(Text(plain(self._why)))
            yield self.answers
