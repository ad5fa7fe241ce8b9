"""Renders what Kubernetes is given, for tests: overlays rendered by kubectl's kustomize, the chart by Helm, both checked
against Kubernetes' own schemas. The programs are wheels in .deps/cluster (./dev)."""
import functools
import os
import subprocess
import sys

import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
KUBERNETES = os.path.join(HERE, "kubernetes")
CHART = os.path.join(HERE, "helm", "attnd")
CLUSTER = os.path.join(ROOT, ".deps", "cluster")
KUBERNETES_VERSION = "1.32"
# Kinds of operators that a cluster may have; their schemas are not Kubernetes' own.
FOREIGN = ("monitoring.coreos.com/", "keda.sh/", "gateway.networking.k8s.io/", "cert-manager.io/")


class Loader(yaml.SafeLoader):
    """As Kubernetes reads YAML, `=` and a key that stands twice are no values."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice among {keys}"
        return super().construct_mapping(node, deep)


def by_kind(text):
    """{kind: document}, where each kind stands once."""
    documents = [document for document in yaml.load_all(text, Loader) if document]
    kinds = [document["kind"] for document in documents]
    assert len(kinds) == len(set(kinds)), kinds
    return dict(zip(kinds, documents))


@functools.cache
def kustomize(folder):
    """The rendered text of a kustomization."""
    done = subprocess.run([os.path.join(CLUSTER, "bin", "kubectl"), "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # warnings of what is deprecated
    return done.stdout


def helm_module():
    if CLUSTER not in sys.path:
        sys.path.append(CLUSTER)
    import helm_python
    return helm_python


def helm_documents(values, name="attnd"):
    """The documents that `helm template` would print, hooks included."""
    with helm_module().Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name=name, namespace="attnd")
    return [document for path, text in sorted(rendered.items()) if path.endswith(".yaml")
            for document in yaml.load_all(text, Loader) if document]


def helm_notes(values):
    with helm_module().Chart.load(CHART) as chart:
        return chart.render(values, name="attnd", namespace="attnd")["attnd/templates/NOTES.txt"]


def helm_findings(values):
    """Returns what `helm lint --strict` says, but for advice on the catalogue's picture."""
    report = helm_module().lint(CHART, values, strict=True)
    return report["errors"] + [m["error"] for m in report["messages"] if m["error"] != "icon is recommended"]


def pod_spec(document):
    return document["spec"] if document["kind"] == "Pod" else document["spec"]["template"]["spec"]


def violations(document):
    """Lists what Kubernetes' own schemas say, as the API server would, about its own kinds alone."""
    import kubernetes_validate
    try:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return "" if document["apiVersion"].startswith(FOREIGN) else "no such kind"
    except kubernetes_validate.ValidationError as error:
        return error.message
    return ""
