"""Environment variables that are set for other libraries. A variable that the user has set is not changed."""

import os
from collections.abc import Mapping

# These keep libraries from reporting to their makers. A tracker that a recipe names still receives the metrics.
TELEMETRY_OFF: Mapping[str, str] = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime >= 1.29: a device id, the interpreter's path, properties of the graph
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub: library versions in the header of every request
    "HF_XET_TELEMETRY_ENABLED": "false",  # hf_xet: figures about a transfer
    "MLFLOW_DISABLE_TELEMETRY": "true",  # mlflow >= 3.2
    "WANDB_ERROR_REPORTING": "false",  # wandb: its own crashes
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # evaluate: a request that counts the use of a module
    "GRADIO_ANALYTICS_ENABLED": "False",  # gradio, which trackio imports
}
# oneDNN compiles a primitive for every shape, and by default it keeps 1024 of about 1 MiB, as torch does beside it.
# Fewer suffice: a step in float32 has 20 shapes, and all steps in bfloat16 have 60 with AMX, where each takes
# milliseconds to compile, and 120 elsewhere.
_PRIMITIVE_CACHES: Mapping[str, str] = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def disable_telemetry() -> None:
    """Disables the telemetry of libraries, which read these variables when they are imported or first used."""
    _set(TELEMETRY_OFF)


def limit_primitive_caches() -> None:
    """Limits oneDNN's caches, so that memory does not grow with the lengths of the data.

    oneDNN reads these variables when it is first used in a process.
    """
    _set(_PRIMITIVE_CACHES)


def _set(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
