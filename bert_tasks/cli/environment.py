"""The command that shows the machine and the software: env."""

from bert_tasks.cli.app import app, show
from bert_tasks.cli.options import AsJson


@app.command()
def env(as_json: AsJson = False) -> None:
    """Print versions, devices, folders and variables for a bug report; secrets are masked.

    Example: bert-tasks env --json
    """
    from bert_tasks.environment import environment, environment_lines

    content = environment()
    show(content, environment_lines(content), as_json=as_json)
