"""What the scripts that measure servers share: child processes, an HTTP client, loads, prompts."""
