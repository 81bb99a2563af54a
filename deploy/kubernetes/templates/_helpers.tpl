{{- define "kvmesh.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- /* At most 40 characters: the longest suffix of ours and of a pod fit into 63. */}}
{{- define "kvmesh.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kvmesh.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvmesh.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "kvmesh.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end }}

{{- /* A value as text. Helm holds a number of a values file as a float, and Go writes 1000000.0 as 1e+06. */}}
{{- define "kvmesh.text" -}}
{{- if and (kindIs "float64" .) (eq (toString .) (floor . | toString)) -}}{{ printf "%.0f" . }}{{- else -}}{{ . }}{{- end -}}
{{- end }}

{{- define "kvmesh.instance" -}}
app.kubernetes.io/name: {{ include "kvmesh.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvmesh.labels" -}}
{{ include "kvmesh.instance" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* Arguments: root, role. */}}
{{- define "kvmesh.selector" -}}
{{ include "kvmesh.instance" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "kvmesh.roles" -}}
frontend prefill decode bootstrap{{ if .Values.planner.enabled }} planner{{ end }}{{ if .Values.observer.enabled }} observer{{ end }}
{{- end }}

{{- define "kvmesh.observerSecret" -}}
{{- default (printf "%s-observer" (include "kvmesh.fullname" .)) .Values.observer.tokenSecret -}}
{{- end }}

{{- define "kvmesh.policyVersion" -}}
{{- if semverCompare "<1.21-0" .Capabilities.KubeVersion.Version -}}policy/v1beta1{{- else -}}policy/v1{{- end -}}
{{- end }}

{{- define "kvmesh.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvmesh.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* Stop if values contradict each other. */}}
{{- define "kvmesh.check" -}}
{{- if .Values.tls.enabled -}}
{{- range splitList "," .Values.etcd.url -}}
{{- if not (hasPrefix "https://" (trim .)) }}{{ fail (printf "tls.enabled: etcd.url must begin with https://, not %s" .) }}{{ end -}}
{{- end -}}
{{- range splitList "," .Values.nats.url -}}
{{- if not (hasPrefix "tls://" (trim .)) }}{{ fail (printf "tls.enabled: nats.url must begin with tls://, not %s" .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.model.storage.type "existingClaim") (not .Values.model.storage.existingClaim) }}{{ fail "model.storage.type is existingClaim: set model.storage.existingClaim" }}{{ end -}}
{{- range $role := list "frontend" "prefill" "decode" "bootstrap" "planner" -}}
{{- $own := index $.Values $role -}}
{{- if not (or (include "kvmesh.pods" $own.maxSurge) (include "kvmesh.pods" $own.maxUnavailable)) }}{{ fail (printf "%s: maxSurge and maxUnavailable cannot both be 0" $role) }}{{ end -}}
{{- end -}}
{{- end }}

{{- /* A number of pods or a percentage; empty for none. */}}
{{- define "kvmesh.pods" -}}
{{- if toString . | trimSuffix "%" | atoi -}}{{ . }}{{- end -}}
{{- end }}
