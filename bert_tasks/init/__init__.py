"""``bert-tasks init`` samples a data file and writes a recipe for it."""

from bert_tasks.init.recipe import RecipeDraft, guess_task, init_recipe, run_name

__all__ = ["RecipeDraft", "guess_task", "init_recipe", "run_name"]
