import dataclasses

import pytest

from align.compare.policy import POLICIES, policy_named, threshold_of
from align.dumpers.errors import UsageError
from align.dumpers.model import OpClass


@pytest.mark.parametrize(
    ("name", "mare", "mere", "rmse"), [("cann-l0", 10, 2, 2), ("cann-l1", 5, 1.5, 1.5), ("cann-l2", 2, 1.2, 1.2)]
)
def test_the_levels_have_the_limits_of_the_standard(name, mare, mere, rmse):
    policy = policy_named(name)
    assert (policy.mare, policy.mere, policy.rmse, policy.small_errors) == (mare, mere, rmse, 2.0)
    assert policy.ratio_limit(policy.rmse, OpClass.ORDINARY) == rmse
    assert 1.0 < policy.ratio_limit(policy.rmse, OpClass.SENSITIVE) < rmse


def test_thresholds_are_those_of_the_standard():
    assert [threshold_of(name) for name in ("float16", "bfloat16", "float32")] == [2.0**-10, 2.0**-7, 2.0**-13]
    assert threshold_of("int64") == 0.0


def test_an_unknown_policy_is_answered_with_the_nearest_and_all():
    with pytest.raises(UsageError) as caught:
        policy_named("cann_l1")
    assert "did you mean 'cann-l1'" in caught.value.remedy
    assert all(name in caught.value.remedy for name in POLICIES)


def test_policies_are_values():
    assert policy_named("auto") == dataclasses.replace(POLICIES["auto"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICIES["auto"].rmse = 3.0
