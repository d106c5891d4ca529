"""The transport through paramiko: configuration, host keys, authentication, connections."""
