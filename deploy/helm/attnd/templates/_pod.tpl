{{- /* (dict "root" $ "pool" its values): a pool's pod, without its labels. */}}
{{- define "attnd.podspec" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $cuda := eq $pool.backend "cuda" -}}
serviceAccountName: {{ include "attnd.serviceaccount" $root }}
automountServiceAccountToken: false
{{- with $pool.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $pool.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $pool.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if $pool.topologySpreadConstraints }}
  {{- toYaml $pool.topologySpreadConstraints | nindent 2 }}
{{- else }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "attnd.poolselector" $ | nindent 8 }}
{{- end }}
{{- end }}
terminationGracePeriodSeconds: {{ $pool.terminationGracePeriodSeconds }}
securityContext: {{ toYaml $pool.podSecurityContext | nindent 2 }}
containers:
  - name: attnd
    image: {{ include "attnd.image" (merge (dict "version" $root.Chart.AppVersion) $pool.image) }}
    imagePullPolicy: {{ $pool.image.pullPolicy }}
    args:
      - --listen=0.0.0.0:{{ include "attnd.port" $root }}
      - --metrics_listen=0.0.0.0:9464
      - --backend={{ $pool.backend }}
      {{- if $root.Values.tls.secretName }}
      - --tls_cert=/etc/attnd/tls/tls.crt
      - --tls_key=/etc/attnd/tls/tls.key
      {{- if $root.Values.tls.clientCertificates }}
      - --tls_client_ca=/etc/attnd/tls/ca.crt
      {{- end }}
      {{- end }}
      {{- if $root.Values.tokens.secretName }}
      - --token_file=/etc/attnd/tokens/tokens
      {{- end }}
      {{- if not (and $root.Values.tls.secretName (or $root.Values.tls.clientCertificates $root.Values.tokens.secretName)) }}
      - --insecure
      {{- end }}
      {{- if $cuda }}
      - --kernel_cache=/var/cache/attnd
      {{- end }}
      {{- if ne $pool.state.kind "none" }}
      - --module_state_dir=/var/lib/attnd/state
      {{- end }}
      {{- range $pool.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    {{- with $pool.extraEnv }}
    env: {{ toYaml . | nindent 6 }}
    {{- end }}
    ports:
      - {name: grpc, containerPort: {{ include "attnd.port" $root }}}
      - {name: metrics, containerPort: 9464}
    {{- include "attnd.probes" $root | nindent 4 }}
    {{- $resources := deepCopy $pool.resources }}
    {{- if $cuda }}
    {{- $limits := omit ($resources.limits | default dict) "cpu" }}
    {{- $_ := set $limits $pool.gpu.resource ($pool.gpu.count | toString) }}
    {{- $_ := set $resources "limits" $limits }}
    {{- end }}
    resources: {{ toYaml $resources | nindent 6 }}
    securityContext: {{ toYaml $pool.securityContext | nindent 6 }}
    {{- $mounts := list }}
    {{- $volumes := list }}
    {{- if $root.Values.tls.secretName }}
    {{- $mounts = append $mounts (dict "name" "tls" "mountPath" "/etc/attnd/tls" "readOnly" true) }}
    {{- $volumes = append $volumes (dict "name" "tls" "secret" (dict "secretName" $root.Values.tls.secretName "defaultMode" 288)) }}
    {{- end }}
    {{- if $root.Values.tokens.secretName }}
    {{- $mounts = append $mounts (dict "name" "tokens" "mountPath" "/etc/attnd/tokens" "readOnly" true) }}
    {{- $volumes = append $volumes (dict "name" "tokens" "secret" (dict "secretName" $root.Values.tokens.secretName "defaultMode" 288)) }}
    {{- end }}
    {{- if $cuda }}
    {{- $mounts = append $mounts (dict "name" "cache" "mountPath" "/var/cache/attnd") }}
    {{- $volumes = append $volumes (dict "name" "cache" "emptyDir" (dict "sizeLimit" "256Mi")) }}
    {{- end }}
    {{- if ne $pool.state.kind "none" }}
    {{- $mounts = append $mounts (dict "name" "state" "mountPath" "/var/lib/attnd") }}
    {{- end }}
    {{- if eq $pool.state.kind "memory" }}
    {{- $volumes = append $volumes (dict "name" "state" "emptyDir" (dict "medium" "Memory" "sizeLimit" $pool.state.size)) }}
    {{- end }}
    {{- with concat $mounts $pool.extraVolumeMounts }}
    volumeMounts: {{ toYaml . | nindent 6 }}
    {{- end }}
{{- with concat $volumes $pool.extraVolumes }}
volumes: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Ready means that a real kernel gave a known answer; it may take a while at first. */}}
{{- define "attnd.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 150
readinessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
  terminationGracePeriodSeconds: 10
{{- end -}}
