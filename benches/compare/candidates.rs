//! What is compared, and how each is started.

use std::{fs, net::TcpListener, os::fd::OwnedFd};

use crate::{
    Result,
    children::{Cpus, DIR, Proc, descriptors, fill, free_port},
};

/// One column of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// No proxy.
    Direct,
    /// Without a limit, or with its own queue of one process.
    Haproxy,
    /// Without a limit.
    Nginx,
    /// A semaphore on Redis, in Lua; polls when full.
    NginxLua,
    /// Tidegate with `limits = []`.
    NoLimit,
    /// Tidegate on its embedded store.
    Embedded,
    /// Tidegate on Redis.
    Redis,
}

/// What a candidate is started for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) cpus: Cpus,
    pub(crate) slots: usize,
    /// How many may wait, for Tidegate.
    pub(crate) queue: usize,
    /// Worker threads of HAProxy.
    pub(crate) haproxy_threads: usize,
    /// Worker threads of Tidegate, which is rather started as often as it needs threads.
    pub(crate) tidegate_threads: usize,
    /// HAProxy's own queue.
    pub(crate) haproxy_queue: bool,
    /// HAProxy is told to keep no small piece back; by default it waits up to 200 ms for more.
    pub(crate) haproxy_no_delay: bool,
    pub(crate) front: Front,
    pub(crate) upstream: u16,
    pub(crate) redis: u16,
}

impl Setup {
    /// One thread, plain HTTP, and no queue but Tidegate's.
    pub(crate) fn new(cpus: Cpus, slots: usize, upstream: u16, redis: u16) -> Self {
        Self {
            cpus,
            slots,
            queue: 100_000,
            haproxy_threads: 1,
            tidegate_threads: 1,
            haproxy_queue: false,
            haproxy_no_delay: false,
            front: Front::Http,
            upstream,
            redis,
        }
    }
}

/// What clients speak to a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Front {
    Http,
    /// TLS 1.3; HTTP/2 for those who offer it.
    Tls,
    /// HTTP/2 without TLS, for those who know.
    H2c,
}

impl Front {
    /// What each candidate's configuration calls it: HAProxy's `bind`, nginx' `listen`, nginx' and Tidegate's certificate.
    fn values(self) -> [(&'static str, &'static str); 4] {
        let [bind, listen, nginx_tls, tls] = match self {
            Self::Http => [""; 4],
            Self::H2c => ["proto h2", "http2", "", ""],
            Self::Tls => [
                "ssl crt @DIR@/../both.pem ssl-min-ver TLSv1.3 alpn h2,http/1.1",
                "ssl http2",
                "ssl_certificate @DIR@/../both.pem; ssl_certificate_key @DIR@/../both.pem; ssl_protocols TLSv1.3;",
                r#"tls = { cert = "@DIR@/../cert.pem", key = "@DIR@/../key.pem", min_version = "1.3" }"#,
            ],
        };
        [("BIND", bind), ("SPEAK", listen), ("NGINX_TLS", nginx_tls), ("TLS", tls)]
    }
}

/// Writes a certificate for everyone who speaks TLS.
pub(crate) fn make_certificate() -> Result<()> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    let (cert, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    fs::write(format!("{DIR}/both.pem"), format!("{cert}{key}"))?;
    fs::write(format!("{DIR}/cert.pem"), cert)?;
    Ok(fs::write(format!("{DIR}/key.pem"), key)?)
}

impl Candidate {
    pub(crate) const ALL: [Self; 7] = [
        Self::Direct,
        Self::Haproxy,
        Self::Nginx,
        Self::NginxLua,
        Self::NoLimit,
        Self::Embedded,
        Self::Redis,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::NginxLua => "nginx-lua",
            Self::NoLimit => "tidegate no limit",
            Self::Embedded => "tidegate embedded",
            Self::Redis => "tidegate redis",
        }
    }

    pub(crate) fn is_tidegate(self) -> bool {
        matches!(self, Self::NoLimit | Self::Embedded | Self::Redis)
    }

    pub(crate) fn uses_redis(self) -> bool {
        matches!(self, Self::NginxLua | Self::Redis)
    }

    /// Starts one process. `number` tells instances apart.
    pub(crate) async fn start(self, setup: &Setup, number: usize) -> Result<Proc> {
        let port = free_port()?;
        let (name, command) = self.command(setup, number, port)?;
        Proc::start(&name, port, setup.cpus, &command).await
    }

    /// Starts one process of Tidegate that takes over a socket, beside others that have the same port. Clients have to
    /// find out when it is there, since its socket listens before.
    pub(crate) async fn start_on(
        self,
        setup: &Setup,
        number: usize,
        socket: TcpListener,
    ) -> Result<Proc> {
        let port = socket.local_addr()?.port();
        let (name, command) = self.command(setup, number, port)?;
        // As systemd hands it over: the socket is descriptor 3, and the process is told so.
        let take = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";
        let take = ["sh", "-c", take, "sh"].map(str::to_owned);
        let command: Vec<String> = take.into_iter().chain(command).collect();
        Proc::start_with(&name, port, setup.cpus, &command, OwnedFd::from(socket).into()).await
    }

    /// A process' name, and how it is started.
    fn command(self, setup: &Setup, number: usize, port: u16) -> Result<(String, Vec<String>)> {
        let name = format!("{}-{number}", self.name().replace(' ', "-"));
        let threads = setup.haproxy_threads.to_string();
        let (listen, admin, slots) =
            (port.to_string(), free_port()?.to_string(), setup.slots.to_string());
        let (queue, nofile) = (setup.queue.to_string(), descriptors().to_string());
        let (upstream, redis) = (setup.upstream.to_string(), setup.redis.to_string());
        let store = if self == Self::Redis {
            format!("redis://127.0.0.1:{redis}")
        } else {
            "memory:".to_owned()
        };
        let values = [
            ("LISTEN", listen.as_str()),
            ("ADMIN", &admin),
            ("UPSTREAM", &upstream),
            ("REDIS", &redis),
            ("SLOTS", &slots),
            ("QUEUE", &queue),
            ("NOFILE", &nofile),
            ("STORE", &store),
            ("THREADS", &threads),
            ("LIMIT", if setup.haproxy_queue { "maxconn 10" } else { "" }),
            ("EVENTS", if setup.haproxy_no_delay { "option http-no-delay" } else { "" }),
            ("LIMITS", if self == Self::NoLimit { "[]" } else { r#"["bench"]"# }),
        ];
        let values: Vec<_> = setup.front.values().into_iter().chain(values).collect();
        let write = |file: &str, template: &str| fill(&name, file, template, &values);
        let command = match self {
            Self::Direct => return Err("direct is no process".into()),
            Self::Haproxy => {
                format!("haproxy -db -f {}", write("haproxy.cfg", include_str!("haproxy.cfg"))?)
            }
            Self::Nginx => format!(
                "nginx -p {DIR}/{name} -c {}",
                write("nginx.conf", include_str!("nginx.conf"))?
            ),
            Self::NginxLua => {
                write("semaphore.lua", include_str!("semaphore.lua"))?;
                format!(
                    "nginx -p {DIR}/{name} -c {}",
                    write("nginx.conf", include_str!("nginx-lua.conf"))?
                )
            }
            Self::NoLimit | Self::Embedded | Self::Redis => {
                let config = write("tidegate.toml", include_str!("tidegate.toml"))?;
                let threads = setup.tidegate_threads;
                format!("{DIR}/tidegate run --config {config} --threads {threads}")
            }
        };
        Ok((name, command.split(' ').map(str::to_owned).collect()))
    }
}

/// Starts a Redis that keeps nothing on disk.
pub(crate) async fn start_redis(cpus: Cpus) -> Result<Proc> {
    let port = free_port()?;
    let command =
        format!("redis-server --port {port} --bind 127.0.0.1 --appendonly no --dir {DIR} --save");
    let mut command: Vec<String> = command.split(' ').map(str::to_owned).collect();
    command.push(String::new());
    Proc::start("redis", port, cpus, &command).await
}
