"""The mark of tests that compute in int8, which are skipped on processors without the instructions for it."""

import pytest

from bert_tasks.encoder.int8 import int8_obstacle

needs_int8 = pytest.mark.skipif(int8_obstacle() is not None, reason=f"{int8_obstacle()}")
