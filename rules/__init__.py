"""The rule files (*.egg, one per operator family or theme) and their loader."""

from .adjoints import with_adjoints
from .loader import Constructor, Rule, RuleBook, load_rules, shipped_files

__all__ = ["Constructor", "Rule", "RuleBook", "load_rules", "shipped_files", "with_adjoints"]
