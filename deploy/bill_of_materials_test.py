"""deploy/bill_of_materials.py: the packages of files, their terms, and an SBOM that CycloneDX's own schema accepts."""
import importlib.resources
import json
import urllib.parse

import pytest

import bill_of_materials


def test_a_file_is_found_under_each_of_its_names():
    packages = {"/lib/x86_64-linux-gnu/libz.so.1": "zlib1g", "/usr/lib/x86_64-linux-gnu/libz.so.1": "zlib1g",
                "/lib/x86_64-linux-gnu/libssl.so.3": "libssl3"}
    assert bill_of_materials.owners(packages) == packages
    assert bill_of_materials.owners([]) == {}
    assert "zlib" in bill_of_materials.terms("zlib1g")


def test_what_has_no_package_or_no_terms_ends_the_build(tmp_path, monkeypatch):
    stranger = tmp_path / "libstranger.so.1"
    stranger.write_bytes(b"")
    with pytest.raises(SystemExit, match="libstranger.so.1: no Debian package has installed it"):
        bill_of_materials.owners(["/lib/x86_64-linux-gnu/libz.so.1", str(stranger)])
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libz.so.1").write_bytes(b"")
    monkeypatch.setattr(bill_of_materials, "DOCUMENTS", str(tmp_path))
    with pytest.raises(SystemExit, match="zlib1g/copyright: not there"):
        bill_of_materials.main(str(tmp_path), [], ["lib/libz.so.1 /lib/x86_64-linux-gnu/libz.so.1"])


def violations(document):
    """Lists what CycloneDX 1.5's schema says against it."""
    import jsonschema
    import referencing
    schemas = importlib.resources.files("cyclonedx.schema") / "_res"
    read = {name: json.loads((schemas / name).read_text())
            for name in (f"{part}.SNAPSHOT.schema.json" for part in ("bom-1.5", "spdx", "jsf-0.82"))}
    main = read["bom-1.5.SNAPSHOT.schema.json"]
    registry = referencing.Registry().with_resources(
        [(urllib.parse.urljoin(main["$id"], name), referencing.Resource.from_contents(schema))
         for name, schema in read.items()])
    validator = jsonschema.validators.validator_for(main)(main, registry=registry)
    return [error.message for error in validator.iter_errors(document)]


@pytest.mark.parametrize("kind", ["application", "library"])
def test_cyclonedx_accepts_the_sbom(kind):
    licences = {package: f"licenses/{package}" for package in ("zlib1g", "libssl3")}
    text = bill_of_materials.sbom(kind, licences, {"zlib1g": {"lib/libz.so.1": b"bytes"}})
    document = json.loads(text)
    assert not violations(document)
    assert text == bill_of_materials.sbom(kind, licences, {"zlib1g": {"lib/libz.so.1": b"bytes"}})
    assert [c["name"] for c in document["components"]] == ["libssl3", "zlib1g"]
    assert document["components"][1]["purl"].startswith("pkg:deb/debian/zlib1g@1%3A1.2.13")
    for planted in ({"specVersion": 1.5}, {"components": [{"name": "x"}]}, {"licence": "x"}):
        assert violations({**document, **planted}), planted
