"""A strict reader of HTML: every element is closed, in order; and a rehearsal, altered."""

import dataclasses
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.faults, self.attributes, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.faults.append(f"</{tag}> closes {self.open[-1:]} at {self.getpos()}")
        else:
            self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)

    def values(self, name, tag=None):
        return [v for t, n, v in self.attributes if n == name and tag in (None, t)]


def altered(result, *, collectives=None, time=None, **fields):
    """A rehearsal with other fields, and these in place of what it reads off its program."""
    changed = dataclasses.replace(result, **fields)
    vars(changed).update(collectives=collectives or result.collectives, time=time or result.time)
    return changed
