"""`prfaas demo`: two clusters on one machine serve real text, and every placement is shown and checked."""
