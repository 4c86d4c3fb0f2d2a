"""``bert-tasks init``: samples a data file, asks each task whether its columns fit, and writes a recipe."""

from bert_tasks.init.recipe import RecipeDraft, guess_task, init_recipe, run_name

__all__ = ["RecipeDraft", "guess_task", "init_recipe", "run_name"]
