{{/* A value of TOML, of any kind. JSON's texts, numbers and booleans are TOML's, too; a table stands in one line. */}}
{{- define "fairlead.toml" -}}
{{- if kindIs "map" . -}}
{ {{- $comma := "" }}{{ range $key, $value := . }}{{ $comma }} {{ include "fairlead.key" $key }} = {{ include "fairlead.toml" $value }}{{ $comma = "," }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{ $comma := "" }}{{ range . }}{{ $comma }}{{ include "fairlead.toml" . }}{{ $comma = ", " }}{{ end }}]
{{- else -}}
{{ toJson . }}
{{- end }}
{{- end }}

{{- define "fairlead.key" -}}
{{ ternary . (toJson .) (regexMatch "^[A-Za-z0-9_-]+$" .) }}
{{- end }}

{{/* The keys of a table, a line each. */}}
{{- define "fairlead.keys" -}}
{{- range $key, $value := . }}
{{- include "fairlead.key" $key }} = {{ include "fairlead.toml" $value }}
{{ end }}
{{- end }}

{{/* The configuration's tables, whichever way they were written, as JSON; fails where the pod could not work with them. */}}
{{- define "fairlead.tables" -}}
{{- $http := dict "listen" (ternary "0.0.0.0:9440" "127.0.0.1:9440" .Values.hardened) }}
{{- $host := ternary (dict "dev" "/host/dev") (dict "proc" "/host/proc") .Values.hardened }}
{{- $tables := mergeOverwrite (dict "host" $host "http" $http) (deepCopy .Values.config) }}
{{- if .Values.configText }}
  {{- $tables = fromToml .Values.configText }}
  {{- if and (hasKey $tables "Error") (eq (len $tables) 1) }}{{ fail (printf "configText is no TOML: %s" $tables.Error) }}{{ end }}
{{- end }}
{{- $where := $tables.host | default dict }}
{{- range $key, $value := $host }}
  {{- if ne (get $where $key) $value }}
    {{- fail (printf "[host] %s is %q: the pod has the node's /%s at %q, so write that" $key (get $where $key) $key $value) }}
  {{- end }}
{{- end }}
{{- $paths := dict "plugin_dir" "/var/lib/kubelet/device-plugins" "kubelet_root" "/var/lib/kubelet"
  "state_dir" "/var/lib/fairlead" "admin_socket" "/run/fairlead/admin.sock" }}
{{- range $key, $value := pick ($tables.agent | default dict) "plugin_dir" "kubelet_root" "state_dir" "admin_socket" }}
  {{- if ne $value (get $paths $key) }}
    {{- fail (printf "[agent] %s is %q, which is not in the pod: leave it out (the kubelet's --root-dir is the value kubeletRoot)" $key $value) }}
  {{- end }}
{{- end }}
{{- $listen := ($tables.http | default dict).listen | default "off" }}
{{- if not (regexMatch "^(\\[.*\\]|[^:/]+):[0-9]+$" $listen) }}
  {{- fail (printf "[http] listen is %q: Prometheus and the page need an address and a port, such as %q" $listen $http.listen) }}
{{- end }}
{{- if and .Values.hardened (regexMatch "^(127\\.|localhost:|\\[::1\\])" $listen) }}
  {{- fail (printf "[http] listen is %q: the pod has a network of its own, where Prometheus cannot reach that; write %q" $listen $http.listen) }}
{{- end }}
{{- toJson $tables }}
{{- end }}

{{/* The port that is listened to. */}}
{{- define "fairlead.port" -}}
{{ regexFind "[0-9]+$" (include "fairlead.tables" . | fromJson).http.listen }}
{{- end }}
