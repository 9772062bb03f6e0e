"""Says what files hold, by which path headrace reads them, what a random sample costs, and what
would make it cheaper.
"""

from headrace.inspecting.inspect import inspect
from headrace.inspecting.report import Access, Advice, Node, Report

__all__ = ["Access", "Advice", "Node", "Report", "inspect"]
