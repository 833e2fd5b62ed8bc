import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.checkpoint.folders.opening import find_model
from pentameter.cli import report
from pentameter.errors import ConfigError, StorageError
from pentameter.record.reading import check_run_folder

METRICS = "".join(
    f'{{"event": "train", "step": {step}, "loss": {4 / step}}}\n' for step in range(1, 6)
)


def test_the_page_and_the_plot(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    plot = tmp_path / "loss.svg"
    assert report.run([str(tmp_path), "--plot", str(plot)]) == 0
    page = tmp_path / "report.html"
    assert capsys.readouterr().out.split() == [str(plot), str(page)]
    assert "<svg" in page.read_text(encoding="utf-8")
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_no_run_folder(tmp_path):
    with pytest.raises(StorageError, match="no such folder"):
        report.run([str(tmp_path / "nowhere")])


def test_no_loss_to_plot(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="no loss to draw yet"):
        report.run([str(tmp_path), "--plot", str(tmp_path / "loss.png")])


def test_wrong_usage():
    with pytest.raises(SystemExit) as stop:
        report.run([])
    assert stop.value.code == 2


def test_neither_help_nor_the_report_needs_torch(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    code = (
        "import sys\n"
        "from pentameter.cli import doctor, report\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"report.run([{str(tmp_path)!r}])\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_page_is_written_where_it_is_asked_for(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    page = tmp_path / "elsewhere.html"
    assert report.run([str(tmp_path), "--out", str(page)]) == 0
    assert capsys.readouterr().out.split() == [str(page)]
    assert "<svg" in page.read_text(encoding="utf-8")
    assert not (tmp_path / "report.html").exists()


def test_a_run_named_without_its_folder_is_found_for_the_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "novel").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"did you mean runs/novel\?"):
        report.run(["novel"])
    for find in (find_model, check_run_folder):
        with pytest.raises(ConfigError, match=r"did you mean runs/novel\?"):
            find(Path("novel"))
        with pytest.raises(ConfigError) as refused:
            find(Path("other"))
        assert "did you mean" not in str(refused.value)
