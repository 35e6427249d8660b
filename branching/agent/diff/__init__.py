"""Comparing what branches did: their files, and their calls of tools."""

from __future__ import annotations

from branching.agent.diff.report import build_diff_report
from branching.agent.diff.tools import ToolDiff, ToolStep, diff_tool_calls

__all__ = ["ToolDiff", "ToolStep", "build_diff_report", "diff_tool_calls"]
