"""The style rules that a machine can check, as tests (pytest).

Each rule is a generator over a tree {path: text} that yields "path:line: what is wrong". It runs on the repository,
and on PLANTED below, a violation that it must find: a rule that finds nothing anywhere would be no test.
"""
import os
import posixpath
import re
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CPP = (".h", ".cc", ".cu", ".cuh")
CODE = CPP + (".py", ".sh", ".bzl", ".proto")


def load_tree():
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split("\0")
    tree = {}
    for name in filter(None, names):
        path = os.path.join(ROOT, name)
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            data = file.read()
        if b"\0" not in data:
            tree[name] = data.decode("utf-8")
    return tree


def is_code(name):
    return name.endswith(CODE) or posixpath.basename(name) in ("BUILD", "dev", "run")


def lines_of(tree, wanted):
    """(path, line number, line) of every file that `wanted` accepts."""
    for name, text in tree.items():
        if wanted(name):
            for number, line in enumerate(text.split("\n"), 1):
                yield name, number, line


def match_lines(tree, wanted, pattern, what):
    expression = re.compile(pattern)
    for name, number, line in lines_of(tree, wanted):
        found = expression.search(line)
        if found:
            yield f"{name}:{number}: {what}: {found.group(0)}"


# ---- Who may include whom.

MAY_INCLUDE = {
    "base": {"base"},
    "attention": {"base", "attention"},
    "kernels": {"base", "attention", "kernels"},
    "server": {"base", "attention", "kernels", "server", "proto"},
    "client": {"base", "attention", "client", "proto"},
}
PROTO_USERS = re.compile(r"(server/.*(decode|encode|service|status_details|wire|daemon)|client/|proto/|tests/|tools/).*"
                         r"\.(h|cc)$")


def includes(tree):
    for name, number, line in lines_of(tree, lambda n: n.endswith(CPP)):
        found = re.match(r'\s*#include\s+"([^"]+)"', line)
        if found:
            yield name, number, found.group(1)


def include_order(tree):
    """base ← attention ← kernels ← server; client needs base, attention and proto only. Tests of tests/ may all."""
    for name, number, target in includes(tree):
        folder, other = name.split("/")[0], target.split("/")[0]
        if folder in MAY_INCLUDE and other in (*MAY_INCLUDE, "proto", "tests") and other not in MAY_INCLUDE[folder]:
            if not name.endswith("_test.cc"):
                yield f"{name}:{number}: {folder}/ may not include {target}"


def generated_headers(tree):
    """The wire's generated types stay in decode, encode, service and the client."""
    for name, number, target in includes(tree):
        if target.startswith("proto/") and target.endswith(".pb.h") and not PROTO_USERS.match(name):
            yield f"{name}:{number}: generated header {target} outside decode, encode, service and client"


def cuda_only_in_driver(tree):
    """Raw driver calls stand in kernels/driver; CUDA headers nowhere outside kernels/."""
    yield from match_lines(tree, lambda n: n.endswith(CPP) and not n.startswith("kernels/driver/"),
                           r"\bcu(Mem|Stream|Event|Module|Launch|Ctx|Device|Func|Init|Pointer)[A-Za-z]*\(",
                           "driver call outside kernels/driver")
    yield from match_lines(tree, lambda n: n.endswith(CPP) and not n.startswith("kernels/"),
                           r'#include\s+[<"](cuda|nvrtc|cuda_runtime)[a-z_]*\.h', "CUDA header outside kernels")


def architecture_is_a_tag(tree):
    yield from match_lines(tree, lambda n: n.endswith(CPP), r"^[^/]*__CUDA_ARCH__", "the architecture is a template tag")
    yield from match_lines(tree, lambda n: n.endswith(CPP) and not re.search(r"(ptx\.h|entry\.cu|\.cuh?)$", n),
                           r"^[^/]*\b(threadIdx|blockIdx)\b\.", "only entry.cu reads it")


# ---- How a file looks.

def headers_open_with_what_they_are(tree):
    for name, text in tree.items():
        if name.endswith(".h") and not text.startswith("// "):
            yield f"{name}:1: a header opens with a comment"
        # Highway's -inl.h headers are included once per vector target.
        if name.endswith(".h") and "\n#pragma once\n" not in text and "HWY_TARGET_TOGGLE" not in text:
            yield f"{name}:1: no #pragma once"
        if name.endswith(".py") and text and not re.match(r'(#![^\n]*\n)?"""', text):
            yield f"{name}:1: a Python file opens with a docstring"


def line_length(tree):
    for name, number, line in lines_of(tree, is_code):
        limit = 100 if name.endswith(CPP) else 160 if name.endswith("BUILD") else 125
        if len(line) > limit and "http" not in line:
            yield f"{name}:{number}: {len(line)} characters, limit {limit}"


def file_length(tree):
    """A page for a header, a few for a source; data tables of tests may be longer."""
    for name, text in tree.items():
        is_kernel = re.match(r"kernels/(sm\d+|cpu)/", name)  # device code is sources that are named headers
        limit = 800 if is_kernel else 350 if name.endswith(".h") else 1000 if "_test" in name else 600
        if name.endswith(CPP + (".py",)) and text.count("\n") > limit:
            yield f"{name}: {text.count(chr(10))} lines, limit {limit}"


def white_space(tree):
    for name, text in tree.items():
        if is_code(name) or name.endswith((".md", ".yaml", ".json")):
            if text and not text.endswith("\n"):
                yield f"{name}: no newline at the end"
            for number, line in enumerate(text.split("\n"), 1):
                if line != line.rstrip() or "\t" in line:
                    yield f"{name}:{number}: trailing space or tab"


def nothing_unfinished(tree):
    yield from match_lines(tree, lambda n: n != "LICENSE", r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b", "unfinished")


def nothing_of_one_machine(tree):
    """The product alone: no path of a developer's machine, no host that it does not run on."""
    yield from match_lines(tree, lambda n: n != "LICENSE", r"(?<![\w.])/(work|root|home/\w+)/\w", "path of a machine")
    yield from match_lines(tree, lambda n: n != "LICENSE", r"\b(pypi|pythonhosted|deb\.debian)\.org\b", "host")


def no_using_namespace_in_headers(tree):
    yield from match_lines(tree, lambda n: n.endswith(".h"), r"^\s*using namespace", "in a header")


def no_test_sleeps(tree):
    """Time comes from Clock; a wait is for an event."""
    yield from match_lines(tree, lambda n: n.endswith("_test.cc"),
                           r"\b(sleep_for|sleep_until|SleepFor|usleep|nanosleep)\(", "a test sleeps")


def banned_words(tree):
    """File names that say nothing."""
    for name in tree:
        if re.search(r"(^|[/_])(utils?|common|helpers?|manager|misc)([._]|$)", posixpath.basename(name)):
            yield f"{name}: a noun not found yet"


# ---- Builds.

def builds_say_who_may_use_them(tree):
    for name, text in tree.items():
        if posixpath.basename(name) == "BUILD" and "cc_library(" in text and "visibility" not in text:
            yield f"{name}: no visibility"
        if name.startswith("server/") and name.endswith("BUILD") and \
                re.search(r"default_visibility = \[\"//visibility:public", text):
            yield f"{name}: nobody but server/ and tests/ uses the server's libraries"


def each_test_is_built(tree):
    """Every *_test.cc and *_fuzzer.cc is named in its folder's BUILD."""
    for name in tree:
        if re.search(r"_(test|fuzzer|benchmark)\.cc$", name):
            build = posixpath.join(posixpath.dirname(name), "BUILD")
            if posixpath.basename(name) not in tree.get(build, ""):
                yield f"{name}: not in {build}"


# ---- Documents.

def slug(heading):
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower())
    return kept.replace(" ", "-")


def links_resolve(tree):
    folders = {posixpath.dirname(n) for n in tree} | {"/".join(n.split("/")[:1]) for n in tree}
    for name, number, line in lines_of(tree, lambda n: n.endswith(".md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if path not in tree and path.rstrip("/") not in folders:
                yield f"{name}:{number}: no file {target}"
            elif anchor and path in tree:
                headings = re.findall(r"^#+ (.*)$", tree[path], re.M)
                if anchor not in map(slug, headings):
                    yield f"{name}:{number}: no heading #{anchor} in {path}"


def documents_are_indexed(tree):
    """docs/README.md links to every document."""
    index = tree.get("docs/README.md", "")
    for name in tree:
        if re.match(r"docs/[^/]+\.md$", name) and name != "docs/README.md" and f"({name[5:]})" not in index:
            yield f"{name}: not in docs/README.md"


def dev_commands(tree):
    return {name.replace("_", "-") for name in re.findall(r"^cmd_([a-z_]+)\(\)", tree.get("dev", ""), re.M)}


def dev_commands_have_help(tree):
    described = set(re.findall(r"^#@ ([a-z-]+) ", tree.get("dev", ""), re.M))
    for command in sorted(dev_commands(tree) ^ described):
        yield f"dev: {command}: a command without help, or help without a command"
    for command in sorted(dev_commands(tree)):
        if f"./dev {command}" not in tree.get("dev", "") and command != "help":
            yield f"dev: {command}: no usage line"


def documents_name_existing_commands(tree):
    commands = dev_commands(tree)
    for name, number, line in lines_of(tree, lambda n: n.endswith(".md")):
        for command in re.findall(r"\./dev ([a-z][a-z-]*)", line):
            if command not in commands:
                yield f"{name}:{number}: there is no ./dev {command}"


RULES = [include_order, generated_headers, cuda_only_in_driver, architecture_is_a_tag,
         headers_open_with_what_they_are, line_length, file_length, white_space, nothing_unfinished,
         nothing_of_one_machine, no_using_namespace_in_headers, no_test_sleeps, banned_words,
         builds_say_who_may_use_them, each_test_is_built, links_resolve, documents_are_indexed, dev_commands_have_help,
         documents_name_existing_commands]

# For each rule, small trees that violate it.
PLANTED = {
    include_order: [{"kernels/a.cc": '#include "server/options.h"\n'}, {"base/a.h": '#include "attention/problem.h"\n'},
                    {"client/a.cc": '#include "server/options.h"\n'}],
    generated_headers: [{"kernels/a.cc": '#include "proto/attnd/v1/attention.pb.h"\n'},
                        {"server/batcher.cc": '#include "proto/attnd/v1/attention.pb.h"\n'}],
    cuda_only_in_driver: [{"kernels/a.cc": "  cuMemAlloc(&p, n);\n"}, {"server/a.cc": "#include <cuda.h>\n"}],
    architecture_is_a_tag: [{"kernels/a.h": "#if __CUDA_ARCH__ >= 700\n"}, {"kernels/a.h": "int t = threadIdx.x;\n"}],
    headers_open_with_what_they_are: [{"base/a.h": "#pragma once\n"}, {"base/a.h": "// A.\nint x;\n"},
                                      {"tests/a.py": "import os\n"}],
    line_length: [{"base/a.cc": "x" * 101}, {"tests/a.py": "x" * 126}],
    file_length: [{"base/a.h": "\n" * 351}, {"base/a.cc": "\n" * 601}, {"base/a_test.cc": "\n" * 1001}],
    white_space: [{"base/a.cc": "int x;"}, {"base/a.cc": "int x; \n"}, {"docs/a.md": "a\tb\n"}],
    nothing_unfinished: [{"base/a.cc": "// TO" "DO: this\n"}],
    nothing_of_one_machine: [{"docs/a.md": "see /wo" "rk/main\n"}, {"dev": "curl https://py" "pi.org\n"}],
    no_using_namespace_in_headers: [{"base/a.h": "using namespace std;\n"}],
    no_test_sleeps: [{"base/a_test.cc": "  absl::SleepFor(absl::Seconds(1));\n"}],
    banned_words: [{"base/string_utils.h": ""}, {"server/helpers.cc": ""}],
    builds_say_who_may_use_them: [{"base/BUILD": "cc_library(\n"},
                                  {"server/BUILD": 'package(default_visibility = ["//visibility:public"])\n'}],
    each_test_is_built: [{"base/a_test.cc": "", "base/BUILD": ""}],
    links_resolve: [{"README.md": "[a](docs/none.md)\n"}, {"README.md": "[a](#none)\n\n# Some\n"}],
    documents_are_indexed: [{"docs/A.md": "", "docs/README.md": "[b](B.md)\n"}],
    dev_commands_have_help: [{"dev": "cmd_a() {\n"}, {"dev": "#@ a  text\n"}],
    documents_name_existing_commands: [{"README.md": "run ./dev fly\n", "dev": "cmd_demo() {\n"}],
}


@pytest.fixture(scope="session")
def tree():
    return load_tree()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps(rule, tree):
    violations = list(rule(tree))
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_what_is_planted(rule):
    for planted in PLANTED[rule]:
        assert list(rule(planted)), planted


def test_every_library_has_a_test():
    """Each cc_library is reached from some cc_test; what only main files use is exempt by tag "untested"."""
    libraries = subprocess.run(
        ["bazel", "query", "--keep_going", "kind(cc_library, //...) except deps(kind(cc_test, //...))"
         " except attr(tags, untested, //...)"],  # --keep_going: the proto rules name a toolchain that is not used
        cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.split()
    assert not libraries


def test_help_of_each_command_is_printed(tree):
    overview = subprocess.run(["./dev", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for command in dev_commands(tree):
        assert re.search(rf"^  {command} ", overview, re.M), overview
        text = subprocess.run(["./dev", command, "--help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert f"./dev {command}" in text
