{{/* What all objects are called: the release, with the chart's name in it. */}}
{{- define "fairlead.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{/* By which the DaemonSet knows its pods: for good, since nobody can change a selector. */}}
{{- define "fairlead.selector" -}}
app.kubernetes.io/name: {{ include "fairlead.name" . }}
app.kubernetes.io/component: device-plugin
{{- end }}

{{- define "fairlead.labels" -}}
app.kubernetes.io/part-of: fairlead
app.kubernetes.io/version: {{ .Chart.AppVersion }}
{{- end }}

{{- define "fairlead.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end }}

{{/* The rights of the daemon, and of the test that asks it. */}}
{{- define "fairlead.securityContext" -}}
{{- if .Values.hardened -}}
# root, who owns the kubelet's sockets and directories, and so needs no capability at all for them.
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsUser: 0
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
# May connect to the kubelet's sockets; docs/installing.md says what to label where SELinux is enforcing.
seLinuxOptions:
  type: container_device_plugin_t
{{- else -}}
privileged: true
readOnlyRootFilesystem: true
{{- end }}
{{- end }}

{{/* Where the host has NVIDIA's driver, and where the pod looks for it: deploy/kubernetes/components/nvidia says why. */}}
{{- define "fairlead.nvidia" -}}
{{- $mounts := dict "none" dict
  "host" (dict "host" "/usr" "type" "Directory" "mount" "/run/nvidia/driver/usr")
  "operator" (dict "host" "/run/nvidia" "type" "DirectoryOrCreate" "mount" "/run/nvidia")
  "cos" (dict "host" "/home/kubernetes/bin/nvidia" "type" "DirectoryOrCreate" "mount" "/home/kubernetes/bin/nvidia") }}
{{- get $mounts .Values.nvidiaDriver | toJson }}
{{- end }}

{{/* Which of [kubernetes] is turned on, and whether a resource is served by DRA: what needs rights at the API server. */}}
{{- define "fairlead.access" -}}
{{- $kubernetes := (include "fairlead.tables" . | fromJson).kubernetes | default dict }}
{{- $access := list }}
{{- range list "events" "condition" "drain_annotation" }}
  {{- if get $kubernetes . }}{{ $access = append $access . }}{{ end }}
{{- end }}
{{- range (include "fairlead.tables" . | fromJson).resource }}
  {{- if and (eq (.serve | default "") "dra") (not (has "dra" $access)) }}{{ $access = append $access "dra" }}{{ end }}
{{- end }}
{{- toJson $access }}
{{- end }}
