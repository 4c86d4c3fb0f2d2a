"""``bert-tasks init`` samples a data file and writes a recipe for it."""

from bert_tasks.init.draft import RecipeDraft
from bert_tasks.init.recipe import init_recipe
from bert_tasks.init.text import run_name

__all__ = ["RecipeDraft", "init_recipe", "run_name"]
