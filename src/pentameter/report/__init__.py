"""One HTML file that shows a run: `write_report(run_dir)`."""

from pentameter.report.plots import loss_figure, save_figure
from pentameter.report.reading import RunRecord, read_run
from pentameter.report.report import write_report

__all__ = ["RunRecord", "loss_figure", "read_run", "save_figure", "write_report"]
