"""Budgets that stop before the money is spent: one ledger for a fork and its branches.

A run reserves each request before sending it, and settles it with the actual usage:

    reserve ── refused: BudgetExhausted, nothing was sent
       └── settle(used), or release() when the request failed

    charge ── for a program that reports its usage afterwards: BudgetExhausted if it is exceeded

A reservation counts as spent until it is settled, so concurrent branches cannot exceed the fork's
budget together. The usage of a request is not known in advance. The reservation is the caller's
estimate, or else the most expensive request of the branch so far. So each branch can exceed a cap
by at most the error of one estimate.

A nested fork also charges the branch around it. Each ledger has one lock, acquired from the inside
out, and never held while waiting. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from branching.agent.errors import BudgetExhausted, UnknownPriceError
from branching.agent.types import Budget, Usage

UnknownPrice = Literal["refuse", "ignore"]
"""What a budget in money does with a request whose price is unknown. With "ignore" the cap is off
for the branch from then on, and its cost is unknown."""

NOTHING = Usage()
_ROUNDING_USD = 1e-9
"""Sums of prices in floating point are off by this much at most; no request is as cheap."""


@dataclass
class _Account:
    limits: Budget
    spent: Usage = NOTHING
    reserved: Usage = NOTHING
    dearest: Usage = NOTHING


class Reservation:
    """A reserved request. The first `settle` or `release` ends it; later calls do nothing."""

    def __init__(
        self, ledger: Ledger, branch_id: str, expected: Usage, outer: Reservation | None
    ) -> None:
        self._ledger = ledger
        self._outer = outer
        self.branch_id = branch_id
        self.expected = expected

    def settle(self, used: Usage) -> None:
        """The request was answered. Never refused: the money is gone."""
        self._ledger._end(self, used)
        if self._outer is not None:
            self._outer.settle(used)

    def release(self) -> None:
        """The request was not sent, or failed without using anything."""
        self.settle(NOTHING)


class Ledger:
    """The accounts of a fork and its branches."""

    def __init__(
        self,
        total: Budget | None = None,
        *,
        unknown_price: UnknownPrice = "refuse",
        outer: tuple[Ledger, str] | None = None,
    ) -> None:
        """`outer` is the account of the branch that this fork is nested in: it pays too."""
        self.total = total or Budget()
        self.unknown_price = unknown_price
        self._outer = outer
        self._accounts: dict[str, _Account] = {}
        self._open: set[Reservation] = set()
        self._lock = threading.Lock()

    def open(self, branch_id: str, limits: Budget, spent: Usage = NOTHING) -> None:
        """Opens the account of a branch, which may have spent something in an earlier life."""
        with self._lock:
            self._accounts[branch_id] = _Account(limits, spent)

    def limits(self, branch_id: str) -> Budget:
        return self._accounts[branch_id].limits

    def spent(self, branch_id: str | None = None) -> Usage:
        """Returns what a branch has used; without one, all of them together."""
        with self._lock:
            return self._spent() if branch_id is None else self._accounts[branch_id].spent

    def reserve(
        self, branch_id: str, expected: Usage | None = None, *, is_priced: bool = True
    ) -> Reservation:
        """Sets aside what the next request is expected to use.

        Without `is_priced` there will be no price. Raises BudgetExhausted when a cap is reached,
        or would be crossed, and UnknownPriceError; nothing is reserved then.
        """
        with self._lock:
            account = self._accounts[branch_id]
            self._check_price(account, is_priced)
            use = account.dearest if expected is None else expected
            one = Usage(usd=use.usd or 0.0, tokens=use.tokens, requests=1)
            whose = f"branch {branch_id}"
            _check(account.limits, account.spent + account.reserved, one, "branch", whose)
            _check(self.total, self._spent() + self._reserved(), one, "aggregate", "the fork")
            outer = None
            if self._outer is not None:
                ledger, around = self._outer
                outer = ledger.reserve(around, use, is_priced=is_priced)
            account.reserved = account.reserved + one
            reservation = Reservation(self, branch_id, one, outer)
            self._open.add(reservation)
            return reservation

    def charge(self, branch_id: str, used: Usage) -> None:
        """Adds usage that was not reserved. It is counted even if this raises.

        Raises:
            BudgetExhausted: A cap is exceeded.
            UnknownPriceError: There is a budget in money, and the price is unknown.
        """
        with self._lock:
            account = self._accounts[branch_id]
            account.spent = account.spent + used
            if self._outer is not None:
                ledger, around = self._outer
                ledger.charge(around, used)
            if used.usd is None:
                self._refuse_price(account, "of a request was not reported")
            _refuse_more(account.limits, account.spent, "branch", f"branch {branch_id}")
            _refuse_more(self.total, self._spent(), "aggregate", "the fork")

    def is_overrun(self) -> bool:
        """Tells whether the branches together have used more than the fork's budget."""
        return bool(_crossed(self.total, self.spent()))

    def reallocate(self, giver: str, taker: str, usd: float) -> None:
        """Moves unspent money from one branch's budget to another's.

        Raises ValueError if the giver has not so much left, or one of them has no such budget.
        """
        with self._lock:
            from_, to = self._accounts[giver], self._accounts[taker]
            if from_.limits.usd is None or to.limits.usd is None or usd < 0:
                raise ValueError(
                    "both branches need a budget in dollars, and the amount must be positive"
                )
            left = from_.limits.usd - ((from_.spent + from_.reserved).usd or 0.0)
            if usd > left + _ROUNDING_USD:
                raise ValueError(f"branch {giver} has {_money(left)} left, not {_money(usd)}")
            from_.limits = _with_usd(from_.limits, from_.limits.usd - usd)
            to.limits = _with_usd(to.limits, to.limits.usd + usd)

    def _end(self, reservation: Reservation, used: Usage) -> None:
        with self._lock:
            if reservation not in self._open:
                return
            self._open.remove(reservation)
            account = self._accounts[reservation.branch_id]
            expected = reservation.expected
            account.reserved = Usage(
                usd=max((account.reserved.usd or 0.0) - (expected.usd or 0.0), 0.0),
                tokens=account.reserved.tokens - expected.tokens,
                requests=account.reserved.requests - 1,
            )
            if used == NOTHING:
                return
            account.spent = account.spent + used
            account.dearest = Usage(
                usd=max(account.dearest.usd or 0.0, used.usd or 0.0),
                tokens=max(account.dearest.tokens, used.tokens),
            )

    def _check_price(self, account: _Account, is_priced: bool) -> None:
        if not is_priced or account.spent.usd is None:
            self._refuse_price(account, "of the model is unknown", "; the request was not sent")

    def _refuse_price(self, account: _Account, what: str, done: str = "") -> None:
        if self.unknown_price == "ignore":
            return
        for limits, scope in ((account.limits, "branch"), (self.total, "aggregate")):
            if limits.usd is not None:
                raise UnknownPriceError(
                    f"the price {what}, so the budget of {_money(limits.usd)} cannot be "
                    f"enforced{done}. Give a price, a budget in tokens or requests, or "
                    'unknown_price="ignore"',
                    scope="aggregate" if scope == "aggregate" else "branch",
                    limit="usd",
                )

    def _spent(self) -> Usage:
        """The sum of the known costs; branches without prices are left out."""
        return _known_sum(account.spent for account in self._accounts.values())

    def _reserved(self) -> Usage:
        return _known_sum(account.reserved for account in self._accounts.values())


def _known_sum(usages: object) -> Usage:
    total, known = NOTHING, 0.0
    for usage in usages:  # type: ignore[attr-defined]
        known += usage.usd or 0.0
        total = Usage(tokens=total.tokens + usage.tokens, requests=total.requests + usage.requests)
    return Usage(usd=known, tokens=total.tokens, requests=total.requests)


def _check(
    limits: Budget,
    used: Usage,
    one: Usage,
    scope: Literal["branch", "aggregate"],
    whose: str,
) -> None:
    """Refuses a request that crosses a cap, or comes when it is reached."""
    caps: Mapping[str, tuple[float | None, float, float]] = {
        "usd": (limits.usd, used.usd or 0.0, one.usd or 0.0),
        "tokens": (limits.tokens, used.tokens, one.tokens),
        "requests": (limits.requests, used.requests, one.requests),
    }
    for limit, (cap, spent, next_) in caps.items():
        if cap is None:
            continue
        is_reached = spent >= cap
        is_crossed = spent + next_ > cap + (_ROUNDING_USD if limit == "usd" else 0)
        if is_reached or is_crossed:
            told = _money if limit == "usd" else str
            more = "" if is_reached else f"; the next request takes about {told(next_)}"
            raise BudgetExhausted(
                f"{whose} has spent {told(spent)} of its budget of {told(cap)}"
                f"{'' if limit == 'usd' else ' ' + limit}{more}",
                scope=scope,
                limit=limit,
            )


def _crossed(limits: Budget, spent: Usage) -> str:
    """Returns the name of a cap that is exceeded, "" if none is."""
    for limit, used in (
        ("usd", spent.usd or 0.0),
        ("tokens", spent.tokens),
        ("requests", spent.requests),
    ):
        cap = getattr(limits, limit)
        if cap is not None and used > cap + _ROUNDING_USD:
            return limit
    return ""


def _refuse_more(
    limits: Budget, spent: Usage, scope: Literal["branch", "aggregate"], whose: str
) -> None:
    """Raises BudgetExhausted if a cap is exceeded."""
    if limit := _crossed(limits, spent):
        used, cap = getattr(spent, limit), getattr(limits, limit)
        told, what = (_money, "") if limit == "usd" else (str, f" {limit}")
        raise BudgetExhausted(
            f"{whose} has spent {told(used)} of its budget of {told(cap)}{what}",
            scope=scope,
            limit=limit,
        )


def _with_usd(limits: Budget, usd: float) -> Budget:
    return Budget(usd=usd, tokens=limits.tokens, requests=limits.requests, seconds=limits.seconds)


def _money(usd: float) -> str:
    return f"${usd:.4f}"
