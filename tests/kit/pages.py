"""What every page must be: whole, with one script that its policy names, loading nothing."""

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input", "hr", "wbr"}


class Checker(HTMLParser):
    """Every element closed in order; collects ids, tags and attributes that load something."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.tags, self.loads = [], [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.loads.append((tag, value))
            assert not name.startswith("on")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(page):
    """`page`, which the assertions hold of."""
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.loads == []
    (script,) = re.findall("<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page  # the browser runs this one and no other
    assert "@import" not in page
    assert not re.search("#ab0[01]", page)  # a colour that stands for one of the style sheet
    return page


def text_of(page):
    return re.sub(r"<[^>]+>", " ", page)
