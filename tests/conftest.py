"""How the suite runs: profiles, threads, and a compile cache that is kept between runs."""

import os

import hypothesis
import pytest
import torch

from purestep.pytest_plugin import purestep_check  # noqa: F401 (the fixture, also where the package is not installed)

hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    max_examples=15,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.register_profile("deep", hypothesis.settings.get_profile("ci"), max_examples=300)
hypothesis.settings.load_profile(os.environ.get("PURESTEP_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def global_state_is_kept():
    """No test, and so no step in it, may leave torch's global state changed."""
    torch.set_num_threads(1)
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), dict(os.environ))
    yield
    changed = {k: v for k, v in os.environ.items() if before[2].get(k) != v and not k.startswith(("PYTEST_", "TORCH"))}
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before[:2]
    assert not changed, changed
