"""How do clients of OpenAI's HTTP API reach this server?

A port of the server's own process, beside gRPC's and on the same edge: the same admission, tenants, quotas, limits,
request log and metrics. `openai_port` opens it and maps errors, a module a route answers, and `fields` lists what each
route takes. A field is honoured or refused by name; none is dropped.
"""
