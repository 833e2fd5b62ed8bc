from pathlib import Path

from pentameter.record.events_page import events_page


def test_the_page_of_events_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "events.md"
    assert page.read_text(encoding="utf-8") == events_page(), "run `make docs`"
