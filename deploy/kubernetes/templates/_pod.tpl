{{- /* A Deployment. Arguments: root, role. */}}
{{- define "kvmesh.deployment" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $own := index $root.Values $role }}
{{- $isWorker := or (eq $role "prefill") (eq $role "decode") }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "kvmesh.fullname" $root }}-{{ $role }}
  labels:
    {{- include "kvmesh.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
spec:
  {{- if eq $role "observer" }}
  replicas: 1
  strategy: {type: Recreate}  # only one process may write the trace file
  {{- else }}
  {{- $replicas := $own.replicas }}
  {{- if and $isWorker $root.Values.planner.enabled }}
  {{- /* The planner's number stays as it is; without a cluster to ask, as in `helm template`, it is the value's. */}}
  {{- $name := printf "%s-%s" (include "kvmesh.fullname" $root) $role }}
  {{- $replicas = dig "spec" "replicas" $replicas (lookup "apps/v1" "Deployment" $root.Release.Namespace $name) }}
  {{- end }}
  replicas: {{ $replicas }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: {{ $own.maxSurge }}
      maxUnavailable: {{ $own.maxUnavailable }}
  {{- end }}
  progressDeadlineSeconds: {{ add $own.startupSeconds 300 }}
  selector:
    matchLabels:
      {{- include "kvmesh.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "kvmesh.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $role }}
        {{- if ne $role "observer" }}
        kvmesh/metrics: "true"
        {{- end }}
      {{- with $own.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "kvmesh.podSpec" . | nindent 6 }}
{{- end }}

{{- define "kvmesh.podSpec" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $own := index $root.Values $role }}
{{- $isWorker := or (eq $role "prefill") (eq $role "decode") }}
{{- $hasModel := or $isWorker (eq $role "frontend") }}
serviceAccountName: {{ include "kvmesh.fullname" $root }}{{ if eq $role "planner" }}-planner{{ end }}
automountServiceAccountToken: {{ eq $role "planner" }}
enableServiceLinks: false  # variables of Services could be mistaken for our settings
{{- /* Two seconds more than a process takes after its drain timeout, and three for the runtime. */}}
terminationGracePeriodSeconds: {{ add $own.drainTimeoutSeconds (default 0 $own.preStopSeconds) 5 }}
securityContext:
  {{- include "kvmesh.podSecurity" $root | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- if and $isWorker $own.gpu.runtimeClassName }}
runtimeClassName: {{ $own.gpu.runtimeClassName }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.topologyKeys }}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvmesh.selector" (dict "root" $root "role" $role) | nindent 8 }}
  {{- end }}
{{- end }}
{{- if and $hasModel (ne $root.Values.model.name "mock") }}
initContainers:
  - name: model  # downloads and converts the model, unless it is already present
    image: {{ include "kvmesh.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [python, -m, engine.model, {{ $root.Values.model.name | quote }}, --state-dir, /var/lib/kvmesh]
    env:
      {{- include "kvmesh.homes" $root | nindent 6 }}
      {{- range $name, $value := merge (dict) $own.settings $root.Values.settings }}
      {{- if hasPrefix "HF_" $name }}
      - {name: {{ $name }}, value: {{ include "kvmesh.text" $value | quote }}}
      {{- end }}
      {{- end }}
    resources:
      {{- toYaml $own.resources | nindent 6 }}
    securityContext:
      {{- include "kvmesh.containerSecurity" $root | nindent 6 }}
    volumeMounts:
      {{- include "kvmesh.commonMounts" . | nindent 6 }}
      {{- include "kvmesh.modelMount" $root | nindent 6 }}
{{- end }}
containers:
  - name: {{ $role }}
    image: {{ include "kvmesh.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [python, -m, services.{{ $role }}]
    env:
      {{- include "kvmesh.env" . | nindent 6 }}
    ports:
      {{- if eq $role "frontend" }}
      - {name: http, containerPort: 8000, protocol: TCP}
      {{- end }}
      {{- if eq $role "observer" }}
      - {name: otlp, containerPort: 4318, protocol: TCP}
      {{- else }}
      - {name: metrics, containerPort: 9100, protocol: TCP}
      {{- end }}
    {{- $port := "metrics" }}
    {{- $scheme := "HTTP" }}
    {{- if eq $role "observer" }}{{ $port = "otlp" }}{{ end }}
    {{- if eq $role "frontend" }}
    {{- $port = "http" }}
    {{- if $own.tlsSecret }}{{ $scheme = "HTTPS" }}{{ end }}
    {{- end }}
    startupProbe:
      httpGet: {path: /health, port: {{ $port }}, scheme: {{ $scheme }}}
      periodSeconds: 2
      timeoutSeconds: 5
      failureThreshold: {{ div $own.startupSeconds 2 }}
    livenessProbe:  # it does not fail in an outage of etcd or NATS, because a restart would not help
      httpGet: {path: {{ ternary "/health" "/live" (eq $role "observer") }}, port: {{ $port }}, scheme: {{ $scheme }}}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    readinessProbe:
      httpGet: {path: {{ ternary "/health" "/ready" (eq $role "observer") }}, port: {{ $port }}, scheme: {{ $scheme }}}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 2
    {{- if $own.preStopSeconds }}
    lifecycle:
      preStop:
        exec: {command: [sleep, {{ $own.preStopSeconds | quote }}]}
    {{- end }}
    resources:
      {{- $resources := deepCopy $own.resources }}
      {{- if $isWorker }}
      {{- range list $own.gpu $own.rdma }}
      {{- if .count }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (dict .resource .count)) }}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
    securityContext:
      {{- include "kvmesh.containerSecurity" $root | nindent 6 }}
        {{- if and $isWorker $own.rdma.count }}
        add: [IPC_LOCK]  # RDMA needs locked memory
        {{- end }}
    volumeMounts:
      {{- include "kvmesh.commonMounts" . | nindent 6 }}
      {{- if $hasModel }}
      {{- include "kvmesh.modelMount" $root | nindent 6 }}
      {{- end }}
      {{- if $isWorker }}
      - {name: shm, mountPath: /dev/shm}
      {{- if $root.Values.kvStore.sizeGB }}
      - {name: kv, mountPath: /var/lib/kvmesh-kv}
      {{- end }}
      {{- end }}
      {{- if and $root.Values.tls.enabled (ne $role "observer") }}
      - {name: tls, mountPath: /etc/kvmesh/tls, readOnly: true}
      {{- end }}
      {{- if eq $role "frontend" }}
      {{- if $own.apiKeysSecret }}
      - {name: api-keys, mountPath: /etc/kvmesh/api-keys, readOnly: true}
      {{- end }}
      {{- if $own.tlsSecret }}
      - {name: https, mountPath: /etc/kvmesh/https, readOnly: true}
      {{- end }}
      {{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: state
    {{- if and (eq $role "observer") $own.existingClaim }}
    persistentVolumeClaim: {claimName: {{ $own.existingClaim }}}
    {{- else }}
    emptyDir: {}
    {{- end }}
  {{- if and $hasModel (ne $root.Values.model.storage.type "emptyDir") }}
  - name: models
    persistentVolumeClaim:
      claimName: {{ ternary (printf "%s-models" (include "kvmesh.fullname" $root)) $root.Values.model.storage.existingClaim (eq $root.Values.model.storage.type "claim") }}
  {{- end }}
  {{- if $isWorker }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ include "kvmesh.text" $own.sharedMemory }}}
  {{- with $root.Values.kvStore }}
  {{- if and .sizeGB .existingClaim }}
  - name: kv
    persistentVolumeClaim: {claimName: {{ .existingClaim }}}
  {{- else if .sizeGB }}
  - name: kv  # the limit of the files is approximate, and a pod beyond its own is evicted
    emptyDir: {sizeLimit: {{ add .sizeGB (max 1 (div .sizeGB 5)) }}G}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- if and $root.Values.tls.enabled (ne $role "observer") }}
  - name: tls
    secret:
      secretName: {{ default (printf "%s-%s-tls" (include "kvmesh.fullname" $root) $role) (index $root.Values.tls.secrets $role) }}
      defaultMode: 0440
  {{- end }}
  {{- if eq $role "frontend" }}
  {{- with $own.apiKeysSecret }}
  - name: api-keys
    secret: {secretName: {{ . }}, defaultMode: 0440}
  {{- end }}
  {{- with $own.tlsSecret }}
  - name: https
    secret: {secretName: {{ . }}, defaultMode: 0440}
  {{- end }}
  {{- end }}
{{- end }}

{{- define "kvmesh.commonMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /var/lib/kvmesh}
{{- end }}

{{- define "kvmesh.modelMount" -}}
{{- if ne .Values.model.storage.type "emptyDir" -}}
- {name: models, mountPath: /var/lib/kvmesh/models}
{{- end -}}
{{- end }}

{{- /* Directories that libraries write to: the image's own are read-only. */}}
{{- define "kvmesh.homes" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /var/lib/kvmesh/models/huggingface}
{{- with .Values.model.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
{{- end }}
{{- end }}

{{- define "kvmesh.env" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $own := index $root.Values $role }}
{{- $isWorker := or (eq $role "prefill") (eq $role "decode") }}
{{ include "kvmesh.homes" $root }}
- {name: PYTHONUNBUFFERED, value: "1"}
- {name: MESH_STATE_DIR, value: /var/lib/kvmesh}
- {name: MESH_LOG_FORMAT, value: json}
- {name: MESH_LOG_LEVEL, value: {{ $root.Values.logLevel | quote }}}
{{- if eq $role "observer" }}
- {name: MESH_OBSERVER_HOST, value: 0.0.0.0}
- name: MESH_OBSERVER_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "kvmesh.observerSecret" $root }}, key: token}}
{{- else }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: MESH_NAMESPACE, value: {{ $root.Values.meshName | quote }}}
- {name: MESH_ETCD_URL, value: {{ $root.Values.etcd.url | quote }}}
- {name: MESH_NATS_URL, value: {{ $root.Values.nats.url | quote }}}
- {name: MESH_METRICS_HOST, value: $(POD_IP)}  # the planner and inspect read the page at this address
- {name: MESH_METRICS_PORT, value: "9100"}
{{- if $root.Values.tls.enabled }}
- {name: MESH_TLS__CA, value: /etc/kvmesh/tls/ca.crt}
- {name: MESH_TLS__CERTIFICATE, value: /etc/kvmesh/tls/tls.crt}
- {name: MESH_TLS__KEY, value: /etc/kvmesh/tls/tls.key}
{{- end }}
{{- if $root.Values.observer.enabled }}
- name: OBSERVER_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "kvmesh.observerSecret" $root }}, key: token}}
- {name: MESH_OTLP_ENDPOINT, value: "http://kvmesh:$(OBSERVER_TOKEN)@{{ include "kvmesh.fullname" $root }}-observer:4318"}
{{- else if $root.Values.observer.otlpEndpoint }}
- {name: MESH_OTLP_ENDPOINT, value: {{ $root.Values.observer.otlpEndpoint | quote }}}
{{- end }}
{{- end }}
{{- if or $isWorker (eq $role "frontend") }}
- {name: MESH_MODEL, value: {{ $root.Values.model.name | quote }}}
{{- with $root.Values.model.servedName }}
- {name: MESH_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if or $isWorker (has $role (list "frontend" "observer")) }}
- {name: MESH_{{ upper $role }}_DRAIN_TIMEOUT_S, value: {{ $own.drainTimeoutSeconds | quote }}}
{{- end }}
{{- if $isWorker }}
- {name: MESH_KV_TRANSFER_HOST, value: {{ default "$(POD_IP)" $root.Values.kvTransfer.host | quote }}}
{{- with $root.Values.kvTransfer.devices }}
- {name: UCX_NET_DEVICES, value: {{ . | quote }}}
{{- end }}
{{- with $root.Values.kvTransfer.ports }}
- {name: UCX_TCP_PORT_RANGE, value: {{ . | quote }}}
{{- end }}
{{- with $root.Values.kvStore.sizeGB }}
- {name: MESH_ENGINE__KV_STORE_GB, value: {{ . | quote }}}
- {name: MESH_ENGINE__KV_STORE_DIR, value: /var/lib/kvmesh-kv}
{{- end }}
{{- if $own.gpu.count }}
- {name: MESH_ENGINE__DEVICE, value: cuda}
{{- $asked := merge (dict) $own.settings $root.Values.settings }}
{{- if and (gt (int $own.gpu.count) 1) (not (hasKey $asked "MESH_ENGINE__TENSOR_PARALLEL")) }}
- {name: MESH_ENGINE__TENSOR_PARALLEL, value: {{ $own.gpu.count | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- if eq $role "frontend" }}
- {name: MESH_FRONTEND_HOST, value: 0.0.0.0}
- {name: MESH_FRONTEND_PORT, value: "8000"}
{{- $service := printf "%s-frontend.%s" (include "kvmesh.fullname" $root) $root.Release.Namespace }}
{{- $hosts := list $service (printf "%s.svc" $service) (printf "%s.svc.%s" $service $root.Values.clusterDomain) }}
- {name: MESH_FRONTEND_ALLOWED_HOSTS, value: {{ concat $hosts $own.allowedHosts | join "," | quote }}}
{{- if $own.apiKeysSecret }}
- {name: MESH_FRONTEND_API_KEYS_FILE, value: /etc/kvmesh/api-keys/keys.toml}
{{- end }}
{{- if $own.tlsSecret }}
- {name: MESH_FRONTEND_TLS_CERT, value: /etc/kvmesh/https/tls.crt}
- {name: MESH_FRONTEND_TLS_KEY, value: /etc/kvmesh/https/tls.key}
{{- end }}
{{- end }}
{{- if eq $role "planner" }}
- {name: MESH_PLANNER_CONNECTOR, value: kubernetes}
- {name: MESH_PLANNER_KUBERNETES_PREFILL, value: deployment/{{ include "kvmesh.fullname" $root }}-prefill}
- {name: MESH_PLANNER_KUBERNETES_DECODE, value: deployment/{{ include "kvmesh.fullname" $root }}-decode}
- {name: MESH_PLANNER_PREFILL, value: {{ $own.prefill | quote }}}
- {name: MESH_PLANNER_DECODE, value: {{ $own.decode | quote }}}
- {name: MESH_PLANNER_TTFT_MS, value: {{ include "kvmesh.text" $own.ttftMs | quote }}}
- {name: MESH_PLANNER_ITL_MS, value: {{ include "kvmesh.text" $own.itlMs | quote }}}
{{- end }}
{{- range $name, $value := merge (dict) $own.settings $root.Values.settings }}
- {name: {{ $name }}, value: {{ include "kvmesh.text" $value | quote }}}
{{- end }}
{{- end }}
