"""What a user may hand us as a target, and what each mistake is answered with."""

from pathlib import Path

import pytest
import torch

from align.dumpers.errors import TargetError
from align.workload import find_target

HEAD = "import torch\nfrom torch import nn\n"


def target(tmp_path: Path, body: str, name: str = "build") -> str:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + body, encoding="utf-8")
    return f"{path}:{name}"


@pytest.mark.parametrize(
    ("returned", "args", "kwargs"),
    [
        ("nn.Linear(2, 3), (torch.ones(1, 2),)", 1, []),
        ("nn.Linear(2, 3), torch.ones(1, 2)", 1, []),
        ("nn.Linear(2, 3), {'input': torch.ones(1, 2)}", 0, ["input"]),
        ("nn.Linear(2, 3), (torch.ones(1, 2),), {}", 1, []),
        ("nn.Linear(2, 3), ((torch.ones(1, 2),), {'a': 1})", 1, ["a"]),
    ],
)
def test_every_documented_form_of_a_target_is_understood(
    tmp_path: Path, returned: str, args: int, kwargs: list[str]
) -> None:
    workload = find_target(target(tmp_path, f"def build():\n    return {returned}\n")).load(0)
    assert (len(workload.args), sorted(workload.kwargs)) == (args, kwargs)


def test_an_object_with_model_inputs_and_loop_is_a_workload(tmp_path: Path) -> None:
    body = (
        "class W:\n    model = nn.Linear(2, 2)\n    inputs = (torch.ones(1, 2),)\n"
        "    @staticmethod\n    def loop(model, x, steps=3):\n"
        "        for _ in range(steps):\n            x = model(x)\n            yield x\n"
        "def build():\n    return W()\n"
    )
    workload = find_target(target(tmp_path, body)).load(0)
    assert workload.loop is not None
    assert len(list(workload.loop(workload.model, *workload.args))) == 3


def test_a_builder_with_declared_choices_gets_the_ones_that_are_on(tmp_path: Path) -> None:
    body = (
        "CHOICES = ('wide', 'deep')\n"
        "def build(choices):\n    return nn.Linear(2, 4 if 'wide' in choices else 2), torch.ones(1, 2)\n"
    )
    found = find_target(target(tmp_path, body))
    assert found.choices == ("wide", "deep")
    assert found.load(0, frozenset({"wide"})).model.out_features == 4
    assert found.load(0).model.out_features == 2


def test_one_seed_gives_one_set_of_weights_and_leaves_the_callers_generator_alone(tmp_path: Path) -> None:
    found = find_target(target(tmp_path, "def build():\n    return nn.Linear(2, 2), torch.ones(1, 2)\n"))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second = found.load(3).model.weight, found.load(3).model.weight
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


def test_a_target_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_target.py").write_text("WIDTH = 5\n")
    body = (
        "import neighbour_of_target\n"
        "def build():\n    return nn.Linear(2, neighbour_of_target.WIDTH), torch.ones(1, 2)\n"
    )
    assert find_target(target(tmp_path, body)).load(0).model.out_features == 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nowhere.py:build", "target file not found: nowhere.py"),
        ("no_such_module_here:build", "cannot import no_such_module_here"),
        ("just-a-word", "not a target"),
        ("math:no_such_function", "math has no function 'no_such_function'"),
    ],
)
def test_a_target_that_is_not_there_is_named(text: str, problem: str) -> None:
    with pytest.raises(TargetError, match=problem):
        find_target(text).load(0)


def test_a_missing_function_is_answered_with_the_functions_there_are(tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        find_target(target(tmp_path, "def make():\n    return None\n"))
    assert "make" in caught.value.remedy


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def build():\n    return 1 / 0\n", "raised ZeroDivisionError: division by zero"),
        ("def build():\n    return nn.Linear(2, 2)\n", "returned a module without inputs"),
        ("def build():\n    return 'hello'\n", "returned str, not a model with inputs"),
    ],
)
def test_a_target_that_misbehaves_is_told_what_it_did(tmp_path: Path, body: str, problem: str) -> None:
    with pytest.raises(TargetError, match=problem):
        find_target(target(tmp_path, body)).load(0)


def test_an_error_at_import_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"raised ValueError: bad luck \(mine.py:3\)"):
        find_target(target(tmp_path, "raise ValueError('bad luck')\n"))
