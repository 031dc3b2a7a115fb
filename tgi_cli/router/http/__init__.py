"""HTTP/1.1, bodies, server-sent events, errors, authentication and admission."""
