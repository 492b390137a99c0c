"""Print the reference of the public API, read from its docstrings: ``make docs`` writes it to ``docs/reference.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "det_core", "det_core.core", "det_core.client", "det_core.accelerated", "det_core.accelerated.callbacks",
    "det_core.accelerated.finetuning", "det_core.accelerated.schedulers", "det_core.accelerated.utils",
    "det_core.pytorch", "det_core.pytorch.samplers", "det_core.pytorch.deepspeed",
)  # fmt: skip
MADE = (
    "Checkpoint", "CheckpointContext", "Checkpoints", "Context", "DeepSpeedTrialContext", "Experiment",
    "ProfilerContext", "PyTorchExperimentalContext", "PyTorchTrialContext", "Run", "SearcherContext",
    "SearcherOperation", "TrainContext", "Trial",
)  # fmt: skip
"""Classes that users do not construct, so that their constructors are not documented."""
HEAD = """\
# Reference

Generated from the docstrings by `make docs`; `help()` shows the same in Python. `det-core COMMAND --help` describes
commands; the keys of an experiment file are in [their own reference](reference-experiment.md).
"""


def reference() -> str:
    """Return the page as Markdown."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser=griffe.Parser.google)
    package = loader.load("det_core")
    loader.resolve_aliases()
    found = {"det_core": package}
    found |= {name: package[name.removeprefix("det_core.")] for name in PACKAGES if name != "det_core"}
    links = [f"[`{name}`](#{name.replace('.', '')})" for name in PACKAGES]
    parts = [HEAD, " · ".join(links) + "\n"]
    for name, module in found.items():
        parts.append(f"## {name}\n")
        if name not in ("det_core", "det_core.client"):
            parts += _docstring(module)
        parts += [line for each in _public(module) for line in _described(each)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


def _public(module: griffe.Module) -> Iterator[griffe.Object]:
    """Return the public names of a module: ``__all__``, or all its own names without an underscore."""
    if module.exports is not None:
        names = sorted(str(name) for name in module.exports)
    else:
        names = [name for name, each in module.members.items() if not each.is_alias and not name.startswith("_")]
    for name in names:
        member = module.members.get(name)
        if member is None:
            continue
        target = _target(member)
        if not target.is_module and target.docstring is not None:
            yield target


def _target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    """Return what an alias stands for, or the member itself."""
    if member.is_alias:
        return member.final_target
    return member


def _described(each: griffe.Object) -> Iterator[str]:
    """Yield the Markdown of a class with its public members, a function, or a constant."""
    if not each.is_class:
        yield f"### {each.name}\n"
        yield from [*_signature(each), *_docstring(each)]
        return
    yield f"### {each.name}\n"
    init = each.all_members.get("__init__")
    if init is not None and init.is_function and not _is_exception(each) and each.name not in MADE:
        yield from _signature(init, each.name)
    without = ""
    if each.name in MADE:
        without = "parameters"
    yield from _docstring(each, without)
    members = [_target(member) for member in each.all_members.values()]
    members = [member for member in members if member.docstring is not None and _is_its_own(member, each)]
    attributes = "".join(
        f"- `{member.name}`: {_plain(' '.join(member.docstring.value.split()))}\n"
        for member in members
        if member.is_attribute and member.docstring is not None
    )
    if attributes:
        yield attributes
    for member in members:
        if member.is_function:
            yield f"#### {each.name}.{member.name}\n"
            yield from [*_signature(member), *_docstring(member)]


def _is_its_own(member: griffe.Object, of: griffe.Object) -> bool:
    """Return whether a member is documented with a class: its own, or that of a private base class."""
    owner = member.parent
    own = owner is of or (owner is not None and owner.name.startswith("_") and owner.path.startswith("det_core"))
    return own and not member.name.startswith("_")


def _is_exception(each: griffe.Object) -> bool:
    return any(str(base).endswith(("Error", "Exception")) for base in each.bases)


def _signature(function: griffe.Object, name: str | None = None) -> list[str]:
    """Return the signature as a block of Python that is not run."""
    if not function.is_function:
        return []
    arguments = []
    kinds = griffe.ParameterKind
    keyword = False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(parameter.kind, "")
        if parameter.kind is kinds.keyword_only and not keyword:
            arguments.append("*")
        keyword = keyword or stars == "*" or parameter.kind is kinds.keyword_only
        annotation = ""
        equals = "="
        if parameter.annotation is not None:
            annotation = f": {parameter.annotation}"
            equals = " = "
        default = ""
        # griffe gives *args and **kwargs defaults, () and {}, which no signature shows.
        if not stars and parameter.default is not None:
            default = f"{equals}{parameter.default}"
        arguments.append(f"{stars}{parameter.name}{annotation}{default}")
    returns = ""
    # A constructor is shown under its class's name, where "-> None" would be wrong.
    if not name and function.returns is not None:
        returns = f" -> {function.returns}"
    line = f"{name or function.name}({', '.join(arguments)}){returns}"
    if len(line) > 100:
        inner = "".join(f"    {argument},\n" for argument in arguments)
        line = f"{name or function.name}(\n{inner}){returns}"
    return [f"```text\n{line}\n```\n"]


def _docstring(each: griffe.Object, without: str = "") -> list[str]:
    """Yield the sections of a docstring as Markdown, except those of one kind."""
    if each.docstring is None:
        return []
    parts = []
    for section in each.docstring.parse(griffe.Parser.google, warnings=False, returns_named_value=False):
        kind = section.kind
        if kind.value == without:
            continue
        if kind is griffe.DocstringSectionKind.text:
            parts.append(_plain(section.value) + "\n")
        elif kind is griffe.DocstringSectionKind.admonition:
            parts.append(f"{section.title}\n\n{_plain(section.value.contents)}\n")
        elif kind is griffe.DocstringSectionKind.examples:
            parts += [f"{_plain(text)}\n" for _, text in section.value]
        else:
            title = {"parameters": "Arguments", "yields": "Gives"}.get(kind.value, kind.value.capitalize())
            parts.append(f"{title}:\n\n" + "".join(_item(item) for item in section.value))
    return parts


def _item(item: griffe.DocstringElement) -> str:
    name = getattr(item, "name", "")
    if not name and item.annotation is not None:
        name = str(item.annotation)
    if name.endswith(","):  # several of one kind: griffe takes the others for its type
        name += f" {item.annotation}"
    text = _plain(" ".join(item.description.split()))
    # The type of what is returned stands in the signature already.
    if not name or isinstance(item, griffe.DocstringReturn):
        return f"- {text}\n"
    return f"- `{name}`: {text}\n"


def _plain(text: str) -> str:
    """Markdown of what is reStructuredText: roles, double backticks, blocks after a double colon."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return re.sub(r"::\n\n((?:(?:    .*)?\n?)+)", lambda m: f":\n\n```text\n{_dedented(m[1])}\n```\n", text)


def _dedented(code: str) -> str:
    return re.sub("^    ", "", code, flags=re.M).strip("\n")


if __name__ == "__main__":
    sys.stdout.write(reference())
