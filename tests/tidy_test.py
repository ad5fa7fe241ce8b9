"""The style rules that a machine can check, as tests (pytest).

Each rule is a generator over a tree {path: text} that yields "path:line: what is wrong". It runs on the repository,
and on PLANTED below, a violation that it must find: a rule that finds nothing anywhere would be no test.
"""
import ast
import collections
import functools
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
    "net": {"base", "net"},
    "attention": {"base", "attention"},
    "modules": {"base", "attention", "modules"},
    "proto": {"base", "attention", "modules", "proto"},
    "kernels": {"base", "attention", "modules", "kernels"},
    "server": {"base", "net", "attention", "modules", "kernels", "server", "proto"},
    "client": {"base", "net", "attention", "modules", "client", "proto"},
}
# Folders of server/, bottom to top: each includes itself and those before it.
SERVER = ["call", "admission", "metrics", "security", "keep", "shared_memory", "schedule", "wire", "rpc", "modules", "app"]
PROTO_USERS = re.compile(r"(server/(wire|rpc|modules|app)/|server/call/status_details|"
                         r"server/shared_memory/shared_memory_service|"
                         r"client/|tools/|tests/|proto/).*\.(h|cc)$")


def is_test(name):
    return bool(re.search(r"_(test|fuzzer|benchmark)\.\w+$|(^|/)(test_\w+|conftest)\.py$|^tests/", name))


def includes(tree):
    for name, number, line in lines_of(tree, lambda n: n.endswith(CPP)):
        found = re.match(r'\s*#include\s+"([^"]+)"', line)
        if found:
            yield name, number, found.group(1)


LOCAL_ENGINE = "client/c/local_functions.cc"  # computes in the caller's process


def include_order(tree):
    """base ← attention ← modules ← proto, kernels ← server, with net beside attention; the client needs no kernels, but for
    LOCAL_ENGINE. Tests and tools may include all."""
    for name, number, target in includes(tree):
        folder, other = name.split("/")[0], target.split("/")[0]
        if folder in MAY_INCLUDE and other in (*MAY_INCLUDE, "tests") and other not in MAY_INCLUDE[folder]:
            if not name.endswith("_test.cc") and (name, other) != (LOCAL_ENGINE, "kernels"):
                yield f"{name}:{number}: {folder}/ may not include {target}"


def server_order(tree):
    """In server/ every file stands in a folder of SERVER, which includes only those before it."""
    for name in tree:
        if name.startswith("server/") and name != "server/BUILD" and name.split("/")[1] not in SERVER:
            yield f"{name}: server/ has the folders {' '.join(SERVER)} alone"
    for name, number, target in includes(tree):
        here, there = ([*path.split("/"), ""][1] for path in (name, target))
        if name.startswith("server/") and target.startswith("server/") and here in SERVER and there in SERVER:
            if SERVER.index(there) > SERVER.index(here):
                yield f"{name}:{number}: {here}/ stands below {target}"


def circles(arrows):
    """Groups of nodes that reach each other; `arrows` is {node: {node}}."""
    def reached(start):
        seen, left = set(), [start]
        while left:
            for node in arrows.get(left.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    left.append(node)
        return seen

    reach = {node: reached(node) for node in arrows}
    groups = {tuple(sorted(other for other in reach[node] if node in reach.get(other, ()))) for node in arrows
              if node in reach[node]}
    return sorted(groups)


def circles_of_folders(arrows):
    """At every level, circles of its folders and files; arrows: (path, line number, path that it needs)."""
    parents = collections.defaultdict(lambda: collections.defaultdict(set))
    example = {}
    for name, number, target in arrows:
        here, there = (re.sub(r"\.\w+$", "", path).split("/") for path in (name, target))
        depth = 0
        while depth < min(len(here), len(there)) - 1 and here[depth] == there[depth]:
            depth += 1
        parent, a, b = "/".join(here[:depth]), here[depth], there[depth]
        if a != b:
            parents[parent][a].add(b)
            example.setdefault((parent, a, b), f"{name}:{number}")
    for parent, edges in sorted(parents.items()):
        for group in circles(edges):
            found = [f"{example[parent, a, b]} -> {b}" for a in group for b in group if (parent, a, b) in example]
            yield f"{parent or '.'}/: circle of {' '.join(group)}: {', '.join(found)}"


def include_circles(tree):
    """At no level do folders include each other in a circle, nor a folder's rooms: a header with its source."""
    yield from circles_of_folders(
        arrow for arrow in includes(tree)
        if not is_test(arrow[0]) or (arrow[0].startswith("tests/") and arrow[2].startswith("tests/")))


PYTHON = "client/python/"


def python_imports(tree):
    """(path, line number, path of the file that is imported), of the client's files in Python: imports for types alone and
    those inside functions too, but not that of a package which comes with one of its files."""
    def file_of(module):
        return next((path for path in (module + ".py", module + "/__init__.py") if path in tree), None)

    for name, text in tree.items():
        if not (name.startswith(PYTHON) and name.endswith(".py")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                bases, names = [alias.name for alias in node.names], []
            elif isinstance(node, ast.ImportFrom):
                bases, names = [node.module or ""], [alias.name for alias in node.names]
            else:
                continue
            level = getattr(node, "level", 0)
            folder = "/".join(name.split("/")[:-level]) if level else PYTHON.rstrip("/")
            for base in bases:
                module = "/".join(filter(None, [folder, *base.split(".")]))
                for found in {file_of(f"{module}/{one}") or file_of(module) for one in names} or {file_of(module)}:
                    if found is not None:
                        yield name, node.lineno, found


def python_circles(tree):
    """At no level do Python's packages import each other in a circle, nor a package's files."""
    yield from circles_of_folders(python_imports(tree))


def folder_sizes(tree):
    """At most 40 files of the product in a folder; tests do not count."""
    sizes = collections.Counter(posixpath.dirname(name) for name in tree if name.endswith(CODE) and not is_test(name))
    for folder, size in sorted(sizes.items()):
        if size > 40:
            yield f"{folder}/: {size} files, limit 40"


def generated_headers(tree):
    """The wire's generated types stay in decode, encode, service and the client."""
    for name, number, target in includes(tree):
        if target.startswith("proto/") and target.endswith(".pb.h") and not PROTO_USERS.match(name):
            yield f"{name}:{number}: generated header {target} outside decode, encode, service and client"


def cuda_only_in_driver(tree):
    """Raw driver calls stand in kernels/cuda/driver; CUDA headers nowhere outside kernels/."""
    yield from match_lines(tree, lambda n: n.endswith(CPP) and not n.startswith(("kernels/cuda/driver/", "tests/fakes/")),
                           r"\bcu(Mem|Stream|Event|Module|Launch|Ctx|Device|Func|Init|Pointer)[A-Za-z]*\(",
                           "driver call outside kernels/cuda/driver")
    yield from match_lines(tree, lambda n: n.endswith(CPP) and not n.startswith(("kernels/", "tests/fakes/")),
                           r'#include\s+[<"](cuda|nvrtc|cuda_runtime)[a-z_]*\.h', "CUDA header outside kernels")


def architecture_is_a_tag(tree):
    yield from match_lines(tree, lambda n: n.endswith(CPP), r"^[^/]*__CUDA_ARCH__", "the architecture is a template tag")
    yield from match_lines(tree, lambda n: n.endswith(CPP) and not n.endswith((".cu", ".cuh")),
                           r"^[^/]*\b(threadIdx|blockIdx)\b\.", "only entry.cuh reads it")


# ---- gRPC, protobuf, OpenSSL and libc by their public interfaces.

SHIMS = re.compile(r"third_party/(tsan_\w+|sanitizer_defaults)\.cc$")  # of tests under sanitizers alone
REPLACED = r"(recv|send)(msg|mmsg|from|to)?|readv?|writev?|p?poll|epoll_\w+|socket|accept4?|connect|close|malloc|free|" \
           r"(SSL|BIO|EVP|X509|CRYPTO)_\w+|(grpc|gpr)_\w+"
PRIVATE = [
    (r'__asm__\s*\(\s*"_Z|\basm\s*\(\s*"_Z|"_Z[A-Z0-9]\w*(grpc|absl|protobuf|std)', "a mangled name"),
    (r"\bdl(v?)sym\(\s*RTLD_(NEXT|DEFAULT)", "the function behind the one that stands before it"),
    (r"\bInternalInlineable\b|\bFinalizeResult\b", "not API"),
    (r"\bgrpc::internal::|\bprotobuf::internal::|\bgrpc_core\b|\bgrpc_event_engine::.*\binternal\b", "internal"),
    (r'#include\s+[<"](grpc|grpcpp)/impl/(?!server_builder_option\.h)', "private header"),
    (r'#include\s+[<"](src/c|bits/|google/protobuf/(stubs/(?!common\.h|logging\.h)|wire_format|port_))', "private header"),
    (r"\bGRPC_CPP_VERSION\w*", "code that fits one version"),
    (rf'^(extern\b[^(]*|[A-Za-z_][\w:<>,*& ]*)[\s*&]({REPLACED})\s*\(', "a library's function"),
    (r"^\s*namespace (grpc|grpc_core|grpc_event_engine|google::protobuf|absl)\b", "a library's namespace"),
]


@functools.cache
def public_grpc_names():
    """Returns what gRPC's C headers name."""
    done = subprocess.run(["grep", "-rhoE", r"\b(grpc|gpr)_\w+", "/usr/include/grpc"], capture_output=True, text=True)
    return set(done.stdout.split())


def public_interfaces_only(tree):
    """No function of a library is replaced or reached but by its public headers."""
    def wanted(name):
        return name.endswith((*CPP, ".c")) and not SHIMS.match(name)

    code = {name: re.sub(r"(?<!:)//.*", "", text) for name, text in tree.items() if wanted(name)}
    for pattern, what in PRIVATE:
        yield from match_lines(code, wanted, pattern, what)
    for name, number, line in lines_of(code, wanted):
        for function in re.findall(r"(?:^\s*|[=(,!&|?:{]\s*|return )((?:grpc|gpr)_\w*[a-z0-9])\(", line):
            if function not in public_grpc_names():
                yield f"{name}:{number}: not in gRPC's headers: {function}"
    yield from match_lines(tree, lambda n: n.endswith(("BUILD", ".bzl", ".bazelrc", ".sh")) or n == "dev",
                           r"--wrap\b|--defsym\b|--weaken|\bobjcopy\b|\b_Z[A-Z0-9]\w+", "symbols of a library")


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
        limit = 800 if is_kernel else 400 if name.endswith(".h") else 1000 if "_test" in name else 600
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


OPENERS = "Of|What|Whose|Such|Besides?"


def comments_open_with_a_subject(tree):
    """The first sentence of a comment or docstring has a subject and a verb, so it opens with none of OPENERS."""
    for name, text in tree.items():
        mark = "//" if name.endswith((*CPP, ".c", ".proto")) else "#"
        if not (is_code(name) or name.endswith((".c", ".yaml", ".yml", ".cfg"))):
            continue
        opens = re.compile(rf'(?:\s*{mark}+@?|.*\S\s+{mark}|\s*[rf]?""") ?({OPENERS})\b')
        before = ""
        for number, line in enumerate(text.split("\n"), 1):
            goes_on = line.lstrip().startswith(mark) and before.lstrip().startswith(mark)
            found = opens.match(line)
            if found and not goes_on:
                yield f"{name}:{number}: a comment opens with {found.group(1)}"
            before = line


def no_using_namespace_in_headers(tree):
    yield from match_lines(tree, lambda n: n.endswith(".h"), r"^\s*using namespace", "in a header")


def no_test_sleeps(tree):
    """Time comes from Clock; a wait is for an event."""
    yield from match_lines(tree, lambda n: n.endswith("_test.cc"),
                           r"\b(sleep_for|sleep_until|SleepFor|usleep|nanosleep)\(", "a test sleeps")


def each_test_skips_itself(tree):
    """pytest-xdist reports one of the files that are skipped at one line, so that `./dev test` never runs the others."""
    skips = {name: found.start() for name, text in tree.items() if name.startswith("tests/python/")
             for found in [re.search(r'^(\w+ = )?pytest\.importorskip\("', text, re.M)] if found}
    for name, begin in skips.items():
        for other in re.findall(r"^(?:from|import) (test_\w+)", tree[name][:begin], re.M):
            if f"tests/python/{other}.py" in skips:
                yield f"{name}: imports {other} before its own importorskip"


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


def each_source_is_built(tree):
    """A folder's BUILD has a room, or names each of its C++ files; tests are a room's, fuzzers and benchmarks are named."""
    for name in tree:
        file, build = posixpath.basename(name), posixpath.join(posixpath.dirname(name), "BUILD")
        if not name.endswith(CPP) or build not in tree and not name.endswith(".cc"):
            continue
        text = tree.get(build, "")
        wanted = "room_test(" if file.endswith("_test.cc") else "room("
        own_rule = re.search(r"_(fuzzer|benchmark)\.cc$", file)
        if f'"{file}"' not in text and (own_rule or not re.search("^" + re.escape(wanted), text, re.M)):
            yield f"{name}: not in {build}"


def builds_are_short(tree):
    """All of them together have at most 2,000 lines, since a room lists no file."""
    lines = {name: text.count("\n") for name, text in tree.items() if posixpath.basename(name) == "BUILD"}
    if sum(lines.values()) > 2000:
        yield f"BUILD files have {sum(lines.values())} lines: {sorted(lines.items(), key=lambda item: -item[1])[:5]}"


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
            if path.endswith(".png") and os.path.isfile(os.path.join(ROOT, path)):
                continue  # the tree has text alone
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


RULES = [include_order, server_order, include_circles, python_circles, folder_sizes, public_interfaces_only,
         generated_headers, cuda_only_in_driver, architecture_is_a_tag,
         headers_open_with_what_they_are, line_length, file_length, white_space, nothing_unfinished,
         nothing_of_one_machine, comments_open_with_a_subject, no_using_namespace_in_headers, no_test_sleeps,
         each_test_skips_itself, banned_words,
         builds_say_who_may_use_them, each_source_is_built, builds_are_short, links_resolve,
         documents_are_indexed, dev_commands_have_help, documents_name_existing_commands]

# For each rule, small trees that violate it.
PLANTED = {
    include_order: [{"kernels/a.cc": '#include "server/options.h"\n'}, {"base/a.h": '#include "attention/problem.h"\n'},
                    {"client/a.cc": '#include "server/options.h"\n'}, {LOCAL_ENGINE: '#include "server/options.h"\n'},
                    {"client/c/mask.cc": '#include "kernels/backend.h"\n'}, {"net/a.h": '#include "attention/problem.h"\n'},
                    {"attention/a.h": '#include "net/spin_wait.h"\n'}, {"server/a.cc": '#include "tests/a.h"\n'},
                    {"modules/a.h": '#include "proto/attnd/v1/module.pb.h"\n'},
                    {"modules/a.h": '#include "kernels/backend.h"\n'}, {"proto/a.cc": '#include "kernels/backend.h"\n'},
                    {"kernels/a.h": '#include "tests/emulator/block.h"\n'}],
    server_order: [{"server/options.h": ""}, {"server/rooms/a.h": ""},
                   {"server/call/call.h": '#include "server/admission/admission.h"\n'}],
    include_circles: [
        {"base/a.h": '#include "net/b.h"\n', "net/b.h": '#include "base/c.h"\n'},
        {"client/x/a.h": '#include "client/y/b.h"\n', "client/y/c.cc": '#include "client/x/d.h"\n'},
        {"client/x/1/a.h": '#include "client/x/2/b.h"\n', "client/x/2/c.cc": '#include "client/x/1/d.h"\n'},
        {"base/a.h": '#include "base/b.h"\n', "base/b.cc": '#include "base/c.h"\n', "base/c.h": '#include "base/a.h"\n'},
        {"tests/x/a_test.cc": '#include "tests/y/b.h"\n', "tests/y/b.h": '#include "tests/x/c.h"\n'}],
    python_circles: [
        {"client/python/p/a.py": "from .b import f\n", "client/python/p/b.py": "def f():\n    from . import a\n"},
        {"client/python/p/a.py": "from .b import f\n",
         "client/python/p/b.py": "if TYPE_CHECKING:\n    from .a import F\n"},
        {"client/python/p/__init__.py": "from .a import f\n", "client/python/p/a.py": "from . import __version__\n"},
        {"client/python/p/a.py": "from .q.c import f\n", "client/python/p/q/c.py": "",
         "client/python/p/q/d.py": "from ..a import g\n"},
        {"client/python/p/a.py": "import p.b\n", "client/python/p/b.py": "import p.a as c\n"}],
    folder_sizes: [{f"base/a{number}.cc": "" for number in range(41)}],
    public_interfaces_only: [
        {"base/a.cc": 'void F() __asm__("_ZN9grpc_core7ExecCtx5FlushEv");\n'},
        {"base/a.cc": '  Find("_ZN4grpc15CompletionQueue21CallbackAlternativeCQEv");\n'},
        {"base/a.cc": '  auto* next = dlsym(RTLD_NEXT, "recvmsg");\n'}, {"base/a.cc": "  reactor->InternalInlineable();\n"},
        {"base/a.cc": "using google::protobuf::internal::WireFormatLite;\n"},
        {"base/a.cc": "  grpc::internal::Call call;\n"}, {"base/a.cc": "  grpc_core::ExecCtx context;\n"},
        {"base/a.cc": "#include <grpcpp/impl/codegen/call.h>\n"}, {"base/a.cc": '#include "src/core/lib/iomgr/pollset.h"\n'},
        {"base/a.cc": "#include <google/protobuf/wire_format_lite.h>\n"},
        {"base/a.cc": "static_assert(GRPC_CPP_VERSION_MAJOR == 1);\n"},
        {"base/a.cc": "ssize_t recvmsg(int socket, msghdr* message, int flags) {\n"},
        {"base/a.cc": "int epoll_wait(int set, epoll_event* events, int most, int ms) {\n"},
        {"base/a.cc": "SSL* SSL_new(SSL_CTX* context) {\n"},
        {"base/a.cc": 'extern "C" void grpc_pollset_init(grpc_pollset* pollset);\n'},
        {"base/a.cc": "  grpc_socket_mutator_init(mutator, &kTable);\n"}, {"base/a.cc": "namespace grpc_core {\n"},
        {"base/BUILD": 'linkopts = ["-Wl,--wrap=recvmsg"]\n'}, {"third_party/a.BUILD": "objcopy --weaken-symbol=a b\n"},
        {"base/BUILD": '"_Z17grpc_pollset_initP12grpc_pollsetPPl"\n'}],
    generated_headers: [{"kernels/a.cc": '#include "proto/attnd/v1/attention.pb.h"\n'},
                        {"server/schedule/batcher.cc": '#include "proto/attnd/v1/attention.pb.h"\n'}],
    cuda_only_in_driver: [{"kernels/a.cc": "  cuMemAlloc(&p, n);\n"}, {"server/a.cc": "#include <cuda.h>\n"}],
    architecture_is_a_tag: [{"kernels/a.h": "#if __CUDA_ARCH__ >= 700\n"}, {"kernels/a.h": "int t = threadIdx.x;\n"}],
    headers_open_with_what_they_are: [{"base/a.h": "#pragma once\n"}, {"base/a.h": "// A.\nint x;\n"},
                                      {"tests/a.py": "import os\n"}],
    line_length: [{"base/a.cc": "x" * 101}, {"tests/a.py": "x" * 126}],
    file_length: [{"base/a.h": "\n" * 401}, {"base/a.cc": "\n" * 601}, {"base/a_test.cc": "\n" * 1001}],
    white_space: [{"base/a.cc": "int x;"}, {"base/a.cc": "int x; \n"}, {"docs/a.md": "a\tb\n"}],
    nothing_unfinished: [{"base/a.cc": "// TO" "DO: this\n"}],
    nothing_of_one_machine: [{"docs/a.md": "see /wo" "rk/main\n"}, {"dev": "curl https://py" "pi.org\n"}],
    comments_open_with_a_subject: [
        {"base/a.h": "// Of a thing.\n"}, {"base/a.cc": "int a;  // What it is.\n"}, {"base/a.cc": "  // Such pages.\n"},
        {"a.py": 'def f():\n    """Whose fault it is."""\n'}, {"a.sh": "# Beside it.\n"}, {"a.proto": "  // Of it.\n"},
        {"base/BUILD": "# What it has.\n"}, {"base/a.cc": "// It is\n// long.\n\n// Of it.\n"}],
    no_using_namespace_in_headers: [{"base/a.h": "using namespace std;\n"}],
    each_test_skips_itself: [
        {"tests/python/test_a.py": 'import pytest\nfrom test_b import f\n\ntorch = pytest.importorskip("torch")\n',
         "tests/python/test_b.py": 'import pytest\n\ntorch = pytest.importorskip("torch")\n'}],
    no_test_sleeps: [{"base/a_test.cc": "  absl::SleepFor(absl::Seconds(1));\n"}],
    banned_words: [{"base/string_utils.h": ""}, {"server/helpers.cc": ""}],
    builds_say_who_may_use_them: [{"base/BUILD": "cc_library(\n"},
                                  {"server/BUILD": 'package(default_visibility = ["//visibility:public"])\n'}],
    each_source_is_built: [{"base/a.cc": "", "base/BUILD": "cc_library()\n"},
                           {"base/a_test.cc": "", "base/BUILD": "room()\n"},
                           {"base/a_benchmark.cc": "", "base/BUILD": "room()\n"}, {"base/a.cc": ""}],
    builds_are_short: [{"base/BUILD": "\n" * 1000, "net/BUILD": "\n" * 1001}],
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
         # --keep_going: the proto rules name a toolchain that is not used
         " except attr(tags, untested, //...) except //tools/..."],
        cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.split()
    assert not libraries


def test_help_of_each_command_is_printed(tree):
    overview = subprocess.run(["./dev", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for command in dev_commands(tree):
        assert re.search(rf"^  {command} ", overview, re.M), overview
        text = subprocess.run(["./dev", command, "--help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert f"./dev {command}" in text


# ---- What is linked.

def run(*command, cwd=ROOT):
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def paths_to_grpc(targets):
    """One path of dependencies from the targets to gRPC; protobuf comes with it, by the generated code."""
    query = f"somepath({targets}, @system//:grpc + @system//:protobuf + //proto/...)"
    # --keep_going: the proto rules name a toolchain that is not used, which counts as an error
    done = subprocess.run(["bazel", "query", "--keep_going", query], cwd=ROOT, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


def test_mathematics_and_kernels_link_no_grpc():
    assert "//server" in paths_to_grpc("//server/...")
    assert not paths_to_grpc("kind(cc_library, //attention/... + //modules/... + //kernels/...)")


NEVER_OURS = {"recvmsg", "sendmsg", "epoll_create1", "epoll_ctl", "epoll_wait", "SSL_new", "SSL_read", "SSL_write"}
PROGRAMS = ["bazel-bin/server/attnd", "bazel-bin/client/attnctl", "bazel-bin/client/c/libattnd_client.so"]


def symbols(path):
    """(kind, name) of each symbol, by nm: T is defined, W weakly, U elsewhere."""
    for line in run("nm", path).split("\n"):
        words = line.split()
        if len(words) >= 2:
            yield words[-2], words[-1].split("@")[0]


@functools.cache
def grpc_functions():
    """Returns what gRPC's own archives define once, inline functions left out."""
    folder = run("g++", "-print-file-name=libgrpc++.a").strip()
    archives = [os.path.join(os.path.dirname(folder), f"lib{name}.a") for name in ("grpc++", "grpc", "gpr")]
    return {name for archive in archives for kind, name in symbols(archive) if kind == "T"}


def wrongly_linked(path, has_grpc_within):
    """A library's functions that this program or shared library defines itself, or has weakened or wrapped."""
    for kind, name in symbols(path):
        if name in NEVER_OURS and kind in "TtWVi":
            yield f"{path}: defines {name}"
        if name.startswith(("__wrap_", "__real_")):
            yield f"{path}: wraps {name}"
        if name in grpc_functions() and (kind in "WV" or kind in "Tt" and not has_grpc_within):
            yield f"{path}: replaces {name}"


@pytest.mark.parametrize("path", PROGRAMS)
def test_programs_replace_no_function_of_a_library(path):
    violations = list(wrongly_linked(os.path.join(ROOT, path), not path.endswith(".so")))
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize("planted", [
    "long recvmsg(int s, void* m, int f) { return s + f; }", "void* SSL_new(void* context) { return context; }",
    "__attribute__((weak)) int epoll_wait(int s) { return s; }", "int __wrap_grpc_init(void) { return 0; }",
    "extern int __real_grpc_init(void); int f(void) { return __real_grpc_init(); }",
    "void _ZN4grpc15CompletionQueue21CallbackAlternativeCQEv(void) {}",
    "__attribute__((weak)) void grpc_init(void) {}"])
def test_a_planted_replacement_is_found(planted, tmp_path):
    (tmp_path / "a.c").write_text(planted + "\n")
    run("gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", "a.so", "a.c", cwd=tmp_path)
    assert list(wrongly_linked(str(tmp_path / "a.so"), has_grpc_within=False))
    (tmp_path / "b.c").write_text("int f(int x) { return x; }\n")
    run("gcc", "-shared", "-fPIC", "-o", "b.so", "b.c", cwd=tmp_path)
    assert not list(wrongly_linked(str(tmp_path / "b.so"), has_grpc_within=False))


def test_client_library_imports_public_functions_alone():
    """The client imports those C functions of gRPC that its headers have, and none of grpc_core, which has no header."""
    imported = {name for kind, name in symbols(os.path.join(ROOT, PROGRAMS[2])) if kind == "U"}
    private = {name for name in imported if re.match(r"(grpc|gpr)_\w+$", name)} - public_grpc_names()
    assert not private | {name for name in imported if re.search(r"9grpc_core|17grpc_event_engine|^_Z\d+grpc_", name)}
    assert any(name.startswith("_ZN4grpc") for name in imported)
