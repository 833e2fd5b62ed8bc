"""The proof for a module of somebody's own: the example's, and faults in what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError, TrainingFailedError
from pentameter.parallel.sources.custom_model import OwnModel
from pentameter.verify.cases import chosen_cases
from pentameter.verify.compare import verify_layouts
from pentameter.verify.sent_model import sent
from pentameter.verify.shrink import shrink
from pentameter.verify.verify_model import verify_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "model.n_layers": 3,
    "model.d_model": 6,
    "model.attention.n_heads": 2,
    "model.feed_forward.width": 8,
    "model.context_length": 8,
}


@pytest.fixture(scope="module")
def example(workers):  # which outlive it, and what it changes of the search path
    with pytest.MonkeyPatch.context() as patch:
        for folder in (EXAMPLES, Path(__file__).parent):
            patch.syspath_prepend(str(folder))
        import own_model

        yield own_model
        for name in ("own_model", "own_modules"):
            sys.modules.pop(name, None)


@pytest.fixture
def standing(standing_workers, monkeypatch):
    """`verify_model` uses workers that are there already: to start others takes seconds."""
    monkeypatch.setattr("pentameter.verify.verify_model.Workers", standing_workers)


def proved(model, layouts, batches=None, **changes):
    config = load_config("grammar", {**SMALL, **changes})
    return verify_model(config, model=model, batches=batches, layouts=layouts, steps=2)


def test_the_example_computes_the_same_on_every_kind_of_layout(example):
    layouts = (
        "data=2;data=2,zero=3;tensor=2;pipeline=2;tensor=2,sequence=1,activation_checkpoint=full"
    )
    outcomes = proved(example.MODEL, layouts)
    assert [(str(each.case), each.problem) for each in outcomes] == [
        ("data=2", None),
        ("data=2,zero=3", None),
        ("tensor=2", None),
        ("pipeline=2", None),
        ("tensor=2,sequence=true,activation_checkpoint=full", None),
    ]
    assert max(each.gradient_error for each in outcomes) < 1e-12


def test_a_wrong_slice_is_found(example, standing):
    from own_modules import skipping_slice

    model = OwnModel(example.build, slice=skipping_slice, blocks="blocks.*")
    right, wrong = proved(model, "data=2;pipeline=2")
    assert right.passed
    assert not wrong.passed
    assert "loss" in wrong.problem


def test_experts_without_tokens_are_updated_alike(example, standing):
    from own_modules import Mixture

    model = OwnModel(Mixture, blocks="blocks.*")
    outcomes = proved(model, "data=1,micro_batches=4;data=2;data=2,activation_checkpoint=full")
    assert [each.problem for each in outcomes] == [None] * 3


def compared(build, layouts, workers, **options):
    """As `verify_model` compares, in processes that are there."""
    source, config = OwnModel(build), load_config("grammar", SMALL)
    cases = chosen_cases(config, layouts)
    small = shrink(config, cases, keeps_model=True)
    options |= {"model": sent(source), "outline_of": source.outline}
    return list(verify_layouts(small, cases, workers, **options))


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference(example, workers):
    from own_modules import SeparateProjections

    layouts = "data=1,micro_batches=4;data=2;data=2,zero=3"
    outcomes = compared(SeparateProjections, layouts, workers, n_steps=2)
    assert [each.problem for each in outcomes] == [None] * 3
    assert max(each.gradient_error for each in outcomes) < 1e-12


@pytest.mark.parametrize(
    "fault",
    ["smallest_doubled", "smallest_dropped", "smallest_off_by_a_thousandth", "faint_not_summed"],
)
def test_a_fault_in_a_faint_gradient_is_found(fault, example, workers):
    from own_modules import Faint

    fault = f"planted_faults:{fault}"
    (right,) = compared(Faint, "data=2", workers, n_steps=1)
    (wrong,) = compared(Faint, "data=2", workers, n_steps=1, prepare=fault)
    assert right.passed
    assert wrong.failure is None, wrong.worker_traceback
    assert wrong.first.subject == "gradient of faint"


FOUR_LAYERS = {"model.n_layers": 4, "model.vocab_size": 16}
LABELLED_LAYOUTS = ("data=2,zero=3", "pipeline=4", "data=2,zero=2,pipeline=2")


def test_batches_of_any_structure_and_parameters_of_any_two_stages(example, standing):
    from own_modules import LABELLED, labelled_batches

    layouts = ";".join(LABELLED_LAYOUTS)
    outcomes = proved(LABELLED, layouts, labelled_batches, **FOUR_LAYERS)
    assert [each.problem for each in outcomes] == [None] * len(LABELLED_LAYOUTS)
    assert max(each.gradient_error for each in outcomes) < 1e-12


@pytest.mark.slow
def test_every_schedule_takes_them(example, standing):
    from own_modules import LABELLED, labelled_batches

    layouts = (
        "data=1,micro_batches=4;pipeline=2,schedule=interleaved,virtual_stages=2;"
        "data=2;pipeline=2,schedule=gpipe;pipeline=2,schedule=zero-bubble;"
        "pipeline=2,schedule=zero-bubble,virtual_stages=2;"
        "data=2,pipeline=2,schedule=zero-bubble-v,virtual_stages=2"
    )
    outcomes = proved(LABELLED, layouts, labelled_batches, **FOUR_LAYERS)
    assert [each.problem for each in outcomes] == [None] * 7


def test_adapters_of_a_custom_model_learn_the_same(example, standing):
    layouts = "data=2,zero=3;tensor=2,sequence=1,pipeline=2"
    outcomes = proved(example.MODEL, layouts, **{"lora.rank": 2})
    assert [each.problem for each in outcomes] == [None] * 2
    assert max(each.gradient_error for each in outcomes) < 1e-12


STARTED = """
from pentameter.parallel.sources.custom_model import model_source
from pentameter.verify.sent_model import sent

from .net import Net


def build(config):
    return Net


if __name__ == "__main__":
    source, _ = sent(model_source(build)).received()
    print(source.build(None).__module__)
"""


def test_a_module_that_was_started_keeps_its_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "net.py").write_text("class Net: pass")
    (package / "run.py").write_text(STARTED)
    done = subprocess.run(
        [sys.executable, "-m", "package.run"],
        capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.strip() == "package.net", done.stderr


def test_a_module_that_draws_whatever_it_is_told_is_refused(example, standing):
    from own_modules import dropping

    with pytest.raises(TrainingFailedError, match="draws random numbers in training"):
        proved(OwnModel(dropping), "data=2")


def test_less_than_one_step_is_refused(example, standing):
    with pytest.raises(ConfigError, match="steps=0 must be 1 or more"):
        verify_model(load_config("grammar", SMALL), model=example.build, layouts="data=2", steps=0)


def test_what_no_other_process_could_import_is_refused(example):
    with pytest.raises(ConfigError, match="define its functions at the top of a file"):
        proved(lambda config: example.build_slice(config, range(3)), "data=2")


def test_layouts_that_a_module_cannot_have_are_refused(example):
    with pytest.raises(ConfigError, match=r"layout 'tensor=2': .*give pm.OwnModel a"):
        proved(example.build, "data=2;tensor=2")


@pytest.mark.slow
def test_all_are_those_that_a_module_can_have(example, standing):
    outcomes = proved(example.build, "all")
    assert all(each.passed for each in outcomes)
    names = [str(each.case) for each in outcomes]
    assert "data=2,zero=3" in names
    assert not any(word in name for name in names for word in ("tensor", "pipeline", "full"))
