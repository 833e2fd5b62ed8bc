from reference_pages import DOCS, events_page


def test_the_page_of_events_is_up_to_date():
    assert (DOCS / "events.md").read_text(encoding="utf-8") == events_page(), "run `make docs`"
