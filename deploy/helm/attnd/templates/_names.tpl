{{- /* The name of what belongs to the whole release. */}}
{{- define "attnd.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* (dict "root" $ "pool" its values): the name of what belongs to one pool. */}}
{{- define "attnd.poolname" -}}
{{- include "attnd.fullname" .root }}{{ with .pool.name }}-{{ . }}{{ end -}}
{{- end -}}

{{- define "attnd.selector" -}}
app.kubernetes.io/name: attnd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "attnd.labels" -}}
{{ include "attnd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* Selects the daemons of one pool, or of all, and not the pod of `helm test`. */}}
{{- define "attnd.poolselector" -}}
{{ include "attnd.selector" .root }}
app.kubernetes.io/component: {{ .pool.name | default "daemon" }}
{{- end -}}

{{- define "attnd.image" -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default .version }}
{{- end -}}
{{- end -}}

{{- define "attnd.serviceaccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "attnd.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "attnd.port" -}}
7070
{{- end -}}
