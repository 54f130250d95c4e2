"""Check recorded rollouts without any assumptions: they may come from a file or another library."""

from agentsgym.record_audit.checks import audit
from agentsgym.record_audit.report import AuditReport, Check, Problem

__all__ = ["AuditReport", "Check", "Problem", "audit"]
