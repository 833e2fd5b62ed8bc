"""One HTML file that shows a run: `write_report(run_dir)`."""
