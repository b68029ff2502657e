"""The rule files (*.egg, one per operator family or theme) and their loader."""

from .loader import Constructor, Rule, RuleBook, load_rules, shipped_files

__all__ = ["Constructor", "Rule", "RuleBook", "load_rules", "shipped_files"]
