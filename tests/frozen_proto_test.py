"""Callers of released versions rely on attention.proto, mask.proto and shared_memory.proto: nothing is renumbered,
retyped, renamed or dropped (pytest), by rules of this file's and by buf's. What is new may come, and is frozen with the next
release:

    protoc -I proto --descriptor_set_out=tests/fixtures/frozen_proto.binpb attnd/v1/{attention,mask,shared_memory}.proto
"""
import copy
import json
import os
import shutil
import subprocess
import tempfile

import pytest

descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FROZEN = os.path.join(ROOT, "tests", "fixtures", "frozen_proto.binpb")
BUF = os.path.join(ROOT, ".deps/buf/bin/buf")  # where `./dev test` puts it
FILES = ["attnd/v1/attention.proto", "attnd/v1/mask.proto", "attnd/v1/shared_memory.proto"]
FIELD = descriptor_pb2.FieldDescriptorProto


def compiled():
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run(["protoc", "-I", "proto", f"--descriptor_set_out={file.name}", *FILES], cwd=ROOT, check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(file.read())


def lines_of_message(prefix, message):
    name = f"{prefix}.{message.name}"
    yield f"message {name}"
    for field in message.field:
        kind = field.type_name.lstrip(".") or FIELD.Type.Name(field.type)[len("TYPE_"):].lower()
        how = FIELD.Label.Name(field.label)[len("LABEL_"):].lower()
        if field.HasField("oneof_index"):
            how = "present" if field.proto3_optional else f"oneof {message.oneof_decl[field.oneof_index].name}"
        yield f"field {name}.{field.name} = {field.number} {kind} {how}"
    for nested in message.nested_type:
        yield from lines_of_message(name, nested)
    for enum in message.enum_type:
        yield from lines_of_enum(name, enum)


def lines_of_enum(prefix, enum):
    for value in enum.value:
        yield f"value {prefix}.{enum.name}.{value.name} = {value.number}"


def lines(files):
    """A line for each thing that a caller's generated code names or sends."""
    for file in files.file:
        for message in file.message_type:
            yield from lines_of_message(file.package, message)
        for enum in file.enum_type:
            yield from lines_of_enum(file.package, enum)
        for service in file.service:
            for method in service.method:
                streams = [word for word, on in (("in", method.client_streaming), ("out", method.server_streaming)) if on]
                yield (f"method {file.package}.{service.name}.{method.name} {method.input_type} {method.output_type}"
                       f" stream {'+'.join(streams) or 'none'}")


def broken(frozen, files):
    """The frozen lines that no longer hold."""
    return sorted(set(frozen) - set(lines(files)))


def read_frozen():
    with open(FROZEN, "rb") as file:
        return list(lines(descriptor_pb2.FileDescriptorSet.FromString(file.read())))


def test_what_is_released_stays():
    frozen = read_frozen()
    assert len(frozen) > 200
    assert not broken(frozen, compiled()), "callers of released versions rely on these: add fields, change none"


def message(files, name):
    return next(m for file in files.file for m in file.message_type if m.name == name)


def field(files, owner, name):
    return next(f for f in message(files, owner).field if f.name == name)


def drop(entries, name):
    entries.remove(next(entry for entry in entries if entry.name == name))


def method(files, name):
    return next(m for file in files.file for s in file.service for m in s.method if m.name == name)


MISTAKES = {
    "a field renumbered": lambda f: setattr(field(f, "Problem", "scale"), "number", 99),
    "a field retyped": lambda f: setattr(field(f, "Problem", "scale"), "type", FIELD.TYPE_DOUBLE),
    "a field renamed": lambda f: setattr(field(f, "Problem", "scale"), "name", "factor"),
    "a field dropped": lambda f: drop(message(f, "ForwardRequest").field, "options"),
    "a field of another message": lambda f: setattr(field(f, "ForwardRequest", "options"), "type_name", ".attnd.v1.Empty"),
    "a field repeated": lambda f: setattr(field(f, "ForwardRequest", "options"), "label", FIELD.LABEL_REPEATED),
    "a field without presence": lambda f: (field(f, "Problem", "scale").ClearField("proto3_optional"),
                                           field(f, "Problem", "scale").ClearField("oneof_index")),
    "a field of mask.proto renumbered": lambda f: setattr(field(f, "MaskSpec", "version"), "number", 17),
    "a field of shared_memory.proto dropped": lambda f: drop(message(f, "AddRegion").field, "size"),
    "a message dropped": lambda f: [drop(file.message_type, "MaskSpec") for file in f.file if "mask" in file.name],
    "an enum's value renumbered": lambda f: setattr(f.file[0].enum_type[0].value[-1], "number", 99),
    "a method dropped": lambda f: drop(f.file[0].service[0].method, "Forward"),
    "a method streams": lambda f: setattr(method(f, "Forward"), "server_streaming", True),
    "another package": lambda f: setattr(f.file[0], "package", "attnd.v2"),
}


@pytest.fixture(scope="module")
def files():
    found = compiled()
    found.file.sort(key=lambda file: file.name)
    return found


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(files, mistake):
    changed = copy.deepcopy(files)
    MISTAKES[mistake](changed)
    assert broken(lines(files), changed)


def test_new_fields_may_come(files):
    changed = copy.deepcopy(files)
    message(changed, "Problem").field.add(name="later", number=400, type=FIELD.TYPE_BOOL, label=FIELD.LABEL_OPTIONAL)
    assert not broken(lines(files), changed)


# ---- By buf.

def buf_breaking(folder):
    """Packages of languages have been named since the release, which had left them to generators."""
    named = [f"FILE_SAME_{name}" for name in ("GO_PACKAGE", "JAVA_PACKAGE", "JAVA_MULTIPLE_FILES")]
    rules = {"use": ["FILE"], "except": named}
    return subprocess.run([BUF, "breaking", str(folder), "--against", FROZEN, "--config",
                           json.dumps({"version": "v2", "breaking": rules})],
                          capture_output=True, text=True, timeout=120,
                          env={**os.environ, "BUF_CACHE_DIR": tempfile.gettempdir()})


@pytest.mark.rare("linters")
def test_buf_finds_nothing_broken_but_what_is_planted(tmp_path):
    found = buf_breaking(os.path.join(ROOT, "proto"))
    assert found.returncode == 0 and not found.stdout, found.stdout + found.stderr
    shutil.copytree(os.path.join(ROOT, "proto"), tmp_path / "proto")
    path = tmp_path / "proto/attnd/v1/mask.proto"
    path.write_text(path.read_text().replace("uint32 version = 1;", "uint32 version = 17;"))
    found = buf_breaking(tmp_path / "proto")
    assert found.returncode != 0 and 'with name "version"' in found.stdout, found.stdout + found.stderr
