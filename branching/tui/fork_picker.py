"""The window in which a fork is made: a row for each branch, and the budget of all together.

A new empty row appears when the last one is filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from branching.agent.types import BranchSpec
from branching.tui.chat.command_parser import NotUnderstood
from branching.tui.chat.fork_settings import parse_usd, spec_of
from branching.tui.chat.settings import Settings
from branching.tui.dialogs import fit_scrolled

FIELDS = ("label", "instruction", "model", "usd")
ROWS_AT_FIRST = 2
NARROW_WIDTH = 64
"""Below this width the fields of a branch are on several lines."""
_WIDTHS = {"label": "10", "instruction": "1fr", "model": "16", "usd": "6"}


@dataclass(frozen=True, kw_only=True)
class Fork:
    """What is to be forked."""

    specs: tuple[BranchSpec, ...]
    aggregate_usd: float | None


class ForkPicker(ModalScreen[Fork | None]):
    """Asks for the branches. Empty rows are left out; None for Escape."""

    DEFAULT_CSS = """
    ForkPicker { align: center middle; }
    ForkPicker > Vertical {
        width: 100%; height: auto; max-height: 100%; border: solid $foreground;
        background: $background;
    }
    ForkPicker VerticalScroll { height: auto; }
    ForkPicker Horizontal { height: 1; }
    /* In a narrow terminal a branch has three lines: label; instruction; model, budget. */
    ForkPicker.-narrow .branch { layout: grid; grid-size: 12 3; height: 3; }
    ForkPicker.-narrow .branch .number { column-span: 1; width: 1fr; }
    ForkPicker.-narrow .branch .label { column-span: 11; width: 1fr; }
    ForkPicker.-narrow .branch .instruction { column-span: 12; width: 1fr; }
    ForkPicker.-narrow .branch .model { column-span: 8; width: 1fr; }
    ForkPicker.-narrow .branch .usd { column-span: 4; width: 1fr; }
    ForkPicker Input { height: 1; margin-right: 1; }
    ForkPicker Input:focus { text-style: reverse; }
    ForkPicker .number { width: 3; }
    ForkPicker .aggregate { width: 25; }
    ForkPicker #aggregate { width: 12; }
    ForkPicker #complaint { height: auto; text-style: bold; }
    """ + "".join(f"ForkPicker .{name} {{ width: {width}; }}\n" for name, width in _WIDTHS.items())
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  (Textual declares no class variable)
        (0, "-narrow"),
        (NARROW_WIDTH, "-wide"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "back"),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
        Binding("tab", "app.focus_next", show=False, priority=True),
        Binding("shift+tab", "app.focus_previous", show=False, priority=True),
    ]

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._keys = Static(Text("[enter] fork   [tab] next field   [escape] back"))

    def compose(self) -> ComposeResult:
        settings = self._settings
        each = "" if settings.per_branch_usd is None else f"{settings.per_branch_usd:g}"
        total = "" if settings.aggregate_usd is None else f"{settings.aggregate_usd:g}"
        with Vertical():
            yield Static("Fork: label, instruction, provider:model, budget in $")
            with VerticalScroll():
                for row in range(1, settings.branches + 1):
                    values = ("", "", settings.models.get(row, ""), each)
                    with Horizontal(id=f"row-{row}", classes="branch") as line:
                        line.display = row <= ROWS_AT_FIRST
                        yield Static(f"{row}", classes="number")
                        for name, value in zip(FIELDS, values, strict=True):
                            yield Input(
                                value,
                                placeholder=name,
                                compact=True,
                                id=f"{name}-{row}",
                                classes=name,
                            )
            with Horizontal():
                yield Static("all together, at most $ ", classes="aggregate")
                yield Input(total, placeholder="no limit", compact=True, id="aggregate")
            yield Static(id="complaint")
            yield self._keys

    def on_mount(self) -> None:
        self.query_one("#label-1", Input).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(lambda: fit_scrolled(self, self._keys))

    def on_input_changed(self) -> None:
        """Shows the row below the last that has a label or a text."""
        filled = [row for row in range(1, self._settings.branches + 1) if any(self._row(row)[:2])]
        shown = max(ROWS_AT_FIRST, max(filled, default=0) + 1)
        for row in range(1, self._settings.branches + 1):
            line = self.query_one(f"#row-{row}")
            line.display = line.display or row <= shown

    def on_input_submitted(self) -> None:
        try:
            specs = [spec_of(self._row(row)) for row in range(1, self._settings.branches + 1)]
            found = tuple(spec for spec in specs if spec is not None)
            if not found:
                raise NotUnderstood("no branch has a label")
            total = self.query_one("#aggregate", Input).value.strip()
            self.dismiss(Fork(specs=found, aggregate_usd=parse_usd(total) if total else None))
        except NotUnderstood as error:
            self.query_one("#complaint", Static).update(Text(str(error)))

    def _row(self, row: int) -> tuple[str, str, str, str]:
        label, instruction, model, usd = (
            self.query_one(f"#{name}-{row}", Input).value for name in FIELDS
        )
        return label, instruction, model, usd
