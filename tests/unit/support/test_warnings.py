"""Which warnings make a test fail: ours, and not those of torch about its own code."""

import warnings

import pytest

OLD = "torch.x is deprecated, use torch.y"


def warn(category: type[Warning], module: str) -> None:
    warnings.warn_explicit(OLD, category, filename="x.py", lineno=1, module=module, registry={})


@pytest.mark.parametrize("module", ["torch", "torch._inductor.compile_fx", "triton.runtime"])
@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
def test_deprecations_inside_torch_do_not_fail(category: type[Warning], module: str) -> None:
    warn(category, module)


@pytest.mark.parametrize("module", ["memagent.rl.update.policy", "torchlike", "tests.gpu"])
@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
def test_deprecations_that_our_code_causes_fail(category: type[Warning], module: str) -> None:
    with pytest.raises(category, match="is deprecated"):
        warn(category, module)


def test_other_warnings_of_torch_fail() -> None:
    with pytest.raises(UserWarning, match="overflow"):
        warnings.warn_explicit("overflow", UserWarning, "x.py", 1, module="torch.nn", registry={})
