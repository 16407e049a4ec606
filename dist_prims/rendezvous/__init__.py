"""How the processes of a job find, recognise and reach each other: launchers, addresses, stores, hosts, the secret.

The lowest layer that communicates. Traces, the backend, repairs and ``dist_prims.launch`` use its modules.
"""
