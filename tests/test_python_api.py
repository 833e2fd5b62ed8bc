"""The names of `import pentameter as pm`, as the package's docstring uses them."""

import subprocess
import sys

PROGRAM = """
import sys
import pentameter as pm
assert "torch" not in sys.modules
config = pm.load_config("grammar", {
    "model.n_layers": 1, "model.d_model": 16, "model.context_length": 16, "train.steps": 2,
    "train.batch_size": 2, "data.grammar.n_characters": 3000, "train.precision": "fp32",
})
assert pm.plan(config, 16).n_parameters > 0
assert "torch" not in sys.modules
end = pm.Trainer(config, run_dir="run", quiet=True).fit()
assert end.step == 2
loaded = pm.load_model("run")
first = pm.generate(loaded.model, loaded.tokenizer, "ab", max_new_tokens=5)
import pentameter.generation.loop, pentameter.planning.plan
assert pm.generate(loaded.model, loaded.tokenizer, "ab", max_new_tokens=5) == first
assert len(first[0]) == 5
"""


def test_the_docstrings_names_work_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
