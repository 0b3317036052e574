#!/usr/bin/env python3
"""Check the prose of this repository against its style. Needs only Python.

    python .ci/prose_check.py                 # all tracked files
    python .ci/prose_check.py FILE ...        # some files
    python .ci/prose_check.py --count         # findings by rule and kind of text
    python .ci/prose_check.py --message FILE  # a commit message, as a hook commit-msg

A comment ``prose: RULE: reason`` exempts a file from a rule.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Pattern and advice of each rule. Well-edited projects of the field hardly ever match one.
_RULES = {
    "fronted-of": (
        r"(?:^|(?<=[.;:!?] ))Of (?:a|an|the|each|it|all|these|those|others|which|what|its|other)\b"
        r"|\b(?:(?:[Ss]ay|[Tt]ell|[Aa]sk)s?|[Ss]how|[Cc]ount) of"
        r" (?:a|an|the|each|all|which|its|it)\b",
        "put the verb's object first: 'Show the scores of each run'",
    ),
    "headless-what": (
        r"(?<!see )(?<!See )(?<!of )\b[Ww]hat (?:is|are|was|were|has|have|had|may|must|can|does|do"
        r"|comes|came|goes|remains|varies|stands|clients?|runs?"
        r"|the (?:client|server|stage|method|codec|run|store|paper|platform|worker)s?)\b",
        "name the thing: 'the tensors that clients keep'",
    ),
    "headless-that": (
        r"\b(?:is|are|as|than|be|and|or|with|by|of) (?:that|those)"
        r" (?:of|with|without|in|by|from|on|for)\b|\bthose (?:that|who|which|whose)\b",
        "repeat the noun",
    ),
    "is-no": (
        r"\b(?:is|are|was|were) (?:no|none of)\b"
        r"(?! longer| more| need| such| worse| better| less| fewer| larger| smaller| greater)",
        "write 'is not a ...'",
    ),
    "alone": (
        r"\b(?!itself|leave|let|X+\b)\w+ alone\b", "write 'only X' before the noun",
    ),
    "too": (r",? too[,.;:)]", "write 'also' before the verb"),
    "beside": (
        r"\b[Bb]esides?\b", "write 'next to', 'in addition to', or 'compared with'",
    ),
    "so-many": (r"\b[Ss]o many\b(?! (?:as|that))", "name the number"),
    "per": (
        r"\b(?:\d[\d,.]*|one|two|three|four|five|ten|several|some) (?!that|where|until|if|when|in"
        r"|of|for|to|on|and|or|by|from|with|as|What|marks|after|between)[a-z]+ an?"
        r" (?:line|number|byte|round|client|run|cell|GPU|layer|matrix|hour|month|second"
        r"|day|week|minute|process|row|step|actor|trial|node|weight|entry|file|machine|core|token|batch"
        r"|seed|key|field|column)\b"
        r"|\ba (?:line|number|byte|scale|row|file|entry|actor|core|value|name) each\b",
        "write 'per'",
    ),
    "archaic": (
        r"\b(?:anew|at hand|by turns|beforehand|in mid-\w+|thereof|for want of)\b",
        "write 'again', 'available', 'alternately', 'in advance' or 'during'",
    ),
    "all-that": (r"\ball (?:that|of what|of it)\b", "name the things"),
    "own": (
        r"\bof (?:its|their|your|my|our|one's) own\b|\bone's own\b|\bown data\b",
        "write 'custom', 'separate', 'user-defined' or 'user data'",
    ),
    "where-if": (
        r"(?<=[,;] )where (?:it|they|there|that|no|none|nothing|fewer|neither|any|some|both)\b",
        "write 'if' or 'when'",
    ),
    "pet-verb": (
        r"\b(?:tells?|told) (?!Ray\b|torch\b|the user\b)|\b[Rr]efuse[sd]?\b(?! connection)",
        "write 'report', 'distinguish', 'raise', 'reject' or 'not support'",
    ),
    "british": (
        r"\b(?:\w*(?:colour|favour|behaviour|neighbour)\w*|centre[ds]?|grey|labelled|labelling"
        r"|modelled|cancelled|towards|catalogue)\b",
        "use American spelling",
    ),
    "percent": (r"\d %", "write '63%'"),
    "as-it-is": (
        r"\bas (?:it|they) (?:is|are|was|were)\b", "write 'unchanged', 'as is' or the state",
    ),
}  # fmt: skip
RULES = {name: (re.compile(pattern), advice) for name, (pattern, advice) in _RULES.items()}
#: Most characters of a commit's subject, and most words of a test's name.
SUBJECT, TEST_WORDS = 72, 8
KINDS = ("docstring", "comment", "message", "page", "yaml", "test")
#: Functions whose texts a user reads.
_PRINTING = ("fail", "note", "warning", "echo", "Option", "Argument", "Field", "not_in_id")
_EXEMPT = re.compile(r"prose: ([\w-]+): \S")


class Text(NamedTuple):
    """A text of a file, and the line where it begins."""

    kind: str
    line: int
    text: str


class Finding(NamedTuple):
    """A place that breaks a rule."""

    line: int
    kind: str
    rule: str
    text: str
    advice: str


def texts(path: Path, source: str) -> Iterator[Text]:
    """Yield the texts of a file that a person reads."""
    if path.suffix == ".md":
        source = re.sub(
            r"```.*?```|<!--.*?-->", lambda m: "\n" * m[0].count("\n"), source, flags=re.S
        )
        line = 1
        for part in re.split(r"(\n\s*\n)", source):
            if part.strip():
                yield Text("page", line, part)
            line += part.count("\n")
    elif path.suffix in (".yaml", ".yml"):
        for number, row in enumerate(source.splitlines(), 1):
            if (found := re.search(r"(?:^|\s)#\s?(.*)", row)) is not None:
                yield Text("yaml", number, found[1])
    else:
        yield from _python_texts(source)


def _python_texts(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (text := ast.get_docstring(node)) is not None:
                yield Text("docstring", node.body[0].lineno, text)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield Text("test", node.lineno, node.name[5:].replace("_", " "))
        raised = node.exc if isinstance(node, ast.Raise) else None
        call = raised or node
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func).rpartition(".")[2]
        if raised is not None or name in _PRINTING:
            described = (k.value for k in call.keywords if k.arg in ("help", "description"))
            for value in (*call.args, *described):
                parts = [
                    n.value
                    for n in ast.walk(value)
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                ]
                if parts:
                    yield Text("message", call.lineno, " ".join(parts))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt:)", token.string):
            yield Text("comment", token.start[0], token.string.lstrip("#: "))


def findings(path: Path) -> Iterator[Finding]:
    """Yield the places of a file that break a rule."""
    source = path.read_text(encoding="utf-8")
    exempt = set(_EXEMPT.findall(source))
    for kind, line, text in texts(path, source):
        if kind == "test" and len(text.split()) > TEST_WORDS:
            yield Finding(line, kind, "long-name", text, f"use at most {TEST_WORDS} words")
        # Code in backticks is not prose.
        plain = re.sub(r"``[^`]*``|`[^`]*`", lambda m: "X" * len(m[0]), text)
        flat = re.sub(r"\s*\n\s*", " ", plain)
        for rule, (pattern, advice) in RULES.items():
            if rule in exempt:
                continue
            for found in pattern.finditer(flat):
                words = r"\s+".join(map(re.escape, found[0].split()))
                before = re.split(words, plain, maxsplit=1)[0]
                yield Finding(line + before.count("\n"), kind, rule, found[0].strip(), advice)


def message_faults(message: str) -> list[str]:
    """Return the faults of a commit message's subject."""
    subject = message.split("\n", 1)[0]
    faults = [f"{p.search(subject)[0]!r}: {a}" for p, a in RULES.values() if p.search(subject)]
    if len(subject) > SUBJECT:
        faults.append(f"{len(subject)} characters, at most {SUBJECT}: move the reason to the body")
    return faults + ["ends with a period"] * subject.endswith(".")


def main() -> int:
    """Run the check; return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--count", action="store_true", help="count findings by rule and kind")
    parser.add_argument("--message", type=Path, help="check the subject of a commit message")
    options = parser.parse_args()
    if options.message:
        faults = message_faults(options.message.read_text(encoding="utf-8"))
        print(*(f"subject: {fault}" for fault in faults), sep="\n", end="\n" * bool(faults))
        return bool(faults)
    words = ["git", "ls-files", "*.py", "*.md", "*.yaml"]
    tracked = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    paths = options.files or [Path(f) for f in tracked if not f.startswith("benchmarks/results/")]
    found = [(path, finding) for path in paths for finding in findings(path)]
    if options.count:
        table = Counter((finding.rule, finding.kind) for _, finding in found)
        print(f"{'rule':16}", *(f"{kind:>10}" for kind in KINDS))
        for rule in (*RULES, "long-name"):
            print(f"{rule:16}", *(f"{table[rule, kind]:>10}" for kind in KINDS))
        return 0
    for path, each in found:
        print(f"{path}:{each.line}: {each.rule} ({each.kind}) {each.text!r}: {each.advice}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
