#!/usr/bin/env python3
"""Lists what is shipped beside attnd's own code: the Debian packages it comes from, their terms, and a CycloneDX 1.5 SBOM.

    python3 deploy/bill_of_materials.py FOLDER [PACKAGE...] < LIST

For the bundle in FOLDER: LIST has a line "NAME PATH" for each library FOLDER/NAME, PATH being the installed file that
it was copied from; PACKAGES are within the programs. Writes FOLDER/licenses/PACKAGE and FOLDER/sbom.cdx.json. With --add
before FOLDER, and no LIST, the packages join those in FOLDER/sbom.cdx.json: an image's base. Files that have been taken
out of FOLDER leave it. The wheel's build imports
it. A file without a package, or a package without a statement of its terms, ends the build.
"""
import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.parse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DOCUMENTS = "/usr/share/doc"


def release():
    """The version in base/version.h."""
    with open(os.path.join(ROOT, "base/version.h")) as file:
        return re.search(r'kVersion = "([^"]+)"', file.read()).group(1)


def owners(paths):
    """{path: the package that installed it}. dpkg knows one of a file's names: with links followed or not, before or after
    /lib became /usr/lib."""
    names = {path: [path, os.path.realpath(path)] for path in paths}
    for known in names.values():
        known += [name[len("/usr"):] if name.startswith("/usr/") else "/usr" + name for name in known]
    asked = sorted(set().union(*names.values()))
    found = subprocess.run(["dpkg-query", "-S", *asked], capture_output=True, text=True).stdout if asked else ""
    packages = {name: package.partition(":")[0] for package, _, name in
                (line.partition(": ") for line in found.splitlines())}
    for path, known in names.items():
        if not any(name in packages for name in known):
            raise SystemExit(f"{path}: no Debian package has installed it, so its terms are not known")
    return {path: next(packages[name] for name in known if name in packages) for path, known in names.items()}


def terms(package):
    """Returns what Debian's package says of its licences."""
    path = os.path.join(DOCUMENTS, package, "copyright")
    if not os.path.exists(path):
        raise SystemExit(f"{path}: not there, so the terms of {package} are not known")
    with open(path, errors="replace") as file:
        return file.read()


def version_of(package):
    done = subprocess.run(["dpkg-query", "-W", "-f=${Version} ${Architecture}", package], check=True, capture_output=True,
                          text=True)
    return done.stdout.split()


def component(package, licence, files):
    """A package of Debian. licence: where its terms stand in what is shipped; files: {name: bytes}, as shipped."""
    version, architecture = version_of(package)
    name, number = (urllib.parse.quote(text, safe="") for text in (package, version))
    purl = f"pkg:deb/debian/{name}@{number}?arch={architecture}&distro=debian-12"
    found = {"type": "library", "bom-ref": package, "name": package, "version": version, "purl": purl,
             "licenses": [{"license": {"name": f"see {licence}"}}]}
    if files:
        found["components"] = [{"type": "file", "name": name, "hashes": [
            {"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}]} for name, data in sorted(files.items())]
    return found


def sbom(kind, licences, files):
    """The document. kind: "application" or "library"; licences: {package: where its terms stand}, of all packages; files:
    {package: {name: bytes}}, of those that have some. The same input gives the same bytes."""
    version = release()
    product = {"type": kind, "bom-ref": "attnd", "name": "attnd", "version": version,
               "purl": f"pkg:generic/attnd@{version}", "licenses": [{"license": {"id": "Apache-2.0"}}]}
    document = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": product},
        "components": [component(package, licences[package], files.get(package, {})) for package in sorted(licences)],
        "dependencies": [{"ref": "attnd", "dependsOn": sorted(licences)}]}
    return json.dumps(document, indent=1) + "\n"


def main(folder, packages, lines):
    files, paths = {}, dict(line.split() for line in lines)
    installed_by = owners(paths.values())
    for name, path in paths.items():
        with open(os.path.join(folder, name), "rb") as file:
            files.setdefault(installed_by[path], {})[name] = file.read()
    licences = write_terms(folder, {*packages, *files})
    with open(os.path.join(folder, "sbom.cdx.json"), "w") as file:
        file.write(sbom("application", licences, files))


def write_terms(folder, packages):
    """{package: the file in the folder that now states its terms}"""
    os.makedirs(os.path.join(folder, "licenses"), exist_ok=True)
    licences = {package: f"licenses/{package}" for package in packages}
    for package, name in licences.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(terms(package))
    return licences


def add(folder, packages):
    path = os.path.join(folder, "sbom.cdx.json")
    with open(path) as file:
        document = json.load(file)
    for shipped in document["components"]:
        shipped["components"] = [file for file in shipped.get("components", [])
                                 if os.path.exists(os.path.join(folder, file["name"]))]
    for package, name in sorted(write_terms(folder, packages).items()):
        document["components"].append(component(package, name, {}))
        document["dependencies"][0]["dependsOn"].append(package)
    with open(path, "w") as file:
        file.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    if sys.argv[1] == "--add":
        add(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1], sys.argv[2:], sys.stdin.read().splitlines())
