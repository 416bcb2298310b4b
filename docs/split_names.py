"""For the API reference: a docstring line `a, b: text` documents two names, which griffe would read as one."""

import re

from griffe import Extension, Object

_NAMES = re.compile(r"(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*)")


def split_names(text: str) -> str:
    """Repeats the text of such a line, and of those that continue it, for each of its names."""
    lines, out = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        if not (found := _NAMES.fullmatch(line)):
            out.append(line)
            continue
        rest, deeper = [], found["indent"] + " "
        while lines and lines[0].startswith(deeper):
            rest.append(lines.pop(0))
        for name in found["names"].split(", "):
            out += [f"{found['indent']}{name}: {found['text']}", *rest]
    return "\n".join(out)


class SplitNames(Extension):
    """Rewrites docstrings when griffe has read them."""

    def on_object(self, *, obj: Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = split_names(obj.docstring.value)
