//! Where the server is that counts: at the URL's address, where Sentinels say, or at a node of a Cluster that
//! another node names.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use deadpool_redis::{
    Manager, Pool, Runtime,
    redis::{
        AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo,
        IntoConnectionInfo, RedisConnectionInfo, RedisError, TlsCertificates,
        aio::MultiplexedConnection,
        cmd,
        io::tcp::{TcpSettings, socket2::TcpKeepalive},
    },
};
use futures_util::future::join_all;
use tokio::{sync::watch, time};

use crate::{
    config::{RedisAt, Sentinels, Store as Settings, StoreTls},
    store::StoreError,
};

/// The link, its successor while that is being opened, and one for those who look.
const CONNECTIONS: usize = 3;
/// Commands that may stand in line for the socket before a caller has to wait.
const COMMANDS_IN_LINE: usize = 1_024;
/// Bytes that the socket's buffer may hold before a flush is forced.
const WRITE_BUFFER: usize = 64 * 1_024;
/// How often Sentinels are asked while all is well: a primary that was cut off from them can't say that it is none any more.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// The server that counts, as far as anybody knows.
pub(super) struct Primary {
    pub(super) pool: Pool,
    pub(super) client: Client,
    addr: (String, u16),
    replaced: watch::Sender<bool>,
}

/// Finds the primary, and remembers it.
pub(super) struct Finder {
    /// How to speak to it, at the URL's address.
    info: ConnectionInfo,
    /// Whoever knows its address, if that isn't the URL's.
    oracle: Option<Oracle>,
    op_timeout: Duration,
    current: Mutex<Option<Arc<Primary>>>,
}

/// The Sentinels that watch one primary.
struct Oracle {
    name: String,
    sentinels: Vec<Sentinel>,
}

struct Sentinel {
    client: Client,
    config: AsyncConnectionConfig,
    connection: tokio::sync::Mutex<Option<MultiplexedConnection>>,
}

// === impl Primary ===

impl Primary {
    fn new(info: ConnectionInfo, op_timeout: Duration) -> Result<Self, StoreError> {
        let addr = host_and_port(&info).unwrap_or_default();
        let client = Client::open(info.clone())?;
        let manager = Manager::new_with_config(info, connection_config(op_timeout))?;
        let pool = Pool::builder(manager)
            .max_size(CONNECTIONS)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(op_timeout))
            .create_timeout(Some(op_timeout))
            .recycle_timeout(Some(op_timeout))
            .build()
            .map_err(|_| StoreError::Unavailable("no pool of connections".to_owned()))?;
        Ok(Self { pool, client, addr, replaced: watch::Sender::default() })
    }

    /// Whether another is known to be the primary now.
    pub(super) fn is_replaced(&self) -> bool {
        *self.replaced.borrow()
    }

    /// Waits until another is known to be the primary.
    pub(super) async fn replaced(&self) {
        // The sender is right here, so it can't be gone.
        _ = self.replaced.subscribe().wait_for(|replaced| *replaced).await;
    }
}

// === impl Finder ===

impl Finder {
    pub(super) fn new(at: &RedisAt, settings: &Settings) -> Result<Self, StoreError> {
        // The URL may hold a password, so no error may carry it.
        let wrong =
            |_| StoreError::Unfit("its URL, or what store.tls names, is not valid".to_owned());
        let info = connection_info(&at.url.0, &settings.tls, settings.op_timeout).map_err(wrong)?;
        let oracle = at.sentinels.as_ref();
        let oracle = oracle.map(|sentinels| Oracle::new(sentinels, &info, settings.op_timeout));
        Ok(Self {
            oracle: oracle.transpose().map_err(wrong)?,
            info,
            op_timeout: settings.op_timeout,
            current: Mutex::default(),
        })
    }

    /// The primary that was found last, or else looks for it.
    pub(super) async fn current(&self) -> Result<Arc<Primary>, StoreError> {
        let current = self.lock().clone();
        match current {
            Some(current) => Ok(current),
            None => self.find().await,
        }
    }

    /// Looks where the primary is now.
    pub(super) async fn find(&self) -> Result<Arc<Primary>, StoreError> {
        if let Some(oracle) = &self.oracle {
            let asked = time::timeout(2 * self.op_timeout, oracle.ask());
            let (host, port) = asked.await.map_err(|_| StoreError::Timeout)??;
            return self.turn_to(host, port);
        }
        if let Some(current) = &*self.lock() {
            return Ok(Arc::clone(current));
        }
        self.replace(self.info.clone())
    }

    /// Takes the server at an address for the primary, from now on.
    pub(super) fn turn_to(&self, host: String, port: u16) -> Result<Arc<Primary>, StoreError> {
        let current = self.lock().clone();
        match current {
            Some(current) if current.addr == (host.clone(), port) => Ok(current),
            _ => self.replace(at(&self.info, host, port)),
        }
    }

    /// Begins anew at the URL's address, if it was another node that doesn't answer.
    pub(super) fn forget(&self) {
        let mut current = self.lock();
        let url = host_and_port(&self.info);
        if self.oracle.is_none()
            && let Some(former) = current.take_if(|current| Some(&current.addr) != url.as_ref())
        {
            former.replaced.send_replace(true);
        }
    }

    /// Asks the Sentinels, again and again, for as long as there are any.
    pub(super) async fn keep_looking(self: Arc<Self>) {
        while self.oracle.is_some() {
            time::sleep(LOOK_EVERY).await;
            if let Err(error) = self.find().await {
                tracing::debug!(%error, "no Sentinel knows the primary");
            }
        }
    }

    fn replace(&self, info: ConnectionInfo) -> Result<Arc<Primary>, StoreError> {
        let primary = Arc::new(Primary::new(info, self.op_timeout)?);
        if let Some(former) = self.lock().replace(Arc::clone(&primary)) {
            former.replaced.send_replace(true);
        }
        Ok(primary)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Primary>>> {
        self.current.lock().expect("nothing panics under this lock")
    }
}

// === impl Oracle ===

impl Oracle {
    fn new(
        sentinels: &Sentinels,
        info: &ConnectionInfo,
        op_timeout: Duration,
    ) -> Result<Self, RedisError> {
        // User and password are those of the servers. Sentinels have their own, or none.
        let mut login = RedisConnectionInfo::default();
        if let Some(user) = &sentinels.user {
            login = login.set_username(user);
        }
        if let Some(password) = &sentinels.password {
            login = login.set_password(&password.0);
        }
        let info = info.clone().set_redis_settings(login);
        let all = sentinels.addrs.iter().map(|(host, port)| {
            let client = Client::open(at(&info, host.clone(), *port))?;
            let (config, connection) = (connection_config(op_timeout), Default::default());
            Ok::<_, RedisError>(Sentinel { client, config, connection })
        });
        Ok(Self { name: sentinels.name.clone(), sentinels: all.collect::<Result<_, _>>()? })
    }

    /// Where the primary is. Sentinels may disagree for a while; who tells of the latest failover is right.
    async fn ask(&self) -> Result<(String, u16), StoreError> {
        let answers =
            join_all(self.sentinels.iter().map(|sentinel| sentinel.ask(&self.name))).await;
        let known = answers.iter().filter_map(|answer| answer.as_ref().ok());
        if let Some((_, addr)) = known.max_by_key(|(epoch, _)| *epoch) {
            return Ok(addr.clone());
        }
        let mut errors: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
        // One that refuses the user tells more than one that doesn't answer.
        errors.sort_by_key(|error| !matches!(error, StoreError::Unfit(_)));
        Err(match errors.swap_remove(0) {
            StoreError::Unfit(why) => {
                StoreError::Unfit(format!("a Sentinel refuses to be asked: {why}"))
            }
            error => StoreError::Unavailable(format!("no Sentinel knows {}: {error}", self.name)),
        })
    }
}

impl Sentinel {
    /// The number of the last failover, and the address that it led to.
    async fn ask(&self, name: &str) -> Result<(u64, (String, u16)), StoreError> {
        let mut kept = self.connection.lock().await;
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => self.client.get_multiplexed_async_connection_with_config(&self.config).await?,
        };
        // While a failover goes on only the first of these knows its outcome. An error of a pipeline wouldn't say which.
        let asks = ["GET-MASTER-ADDR-BY-NAME", "MASTER"]
            .map(|what| cmd("SENTINEL").arg(what).arg(name).to_owned());
        let addr = asks[0].query_async(&mut connection).await?;
        let facts: HashMap<String, String> = asks[1].query_async(&mut connection).await?;
        *kept = Some(connection);
        let epoch = facts.get("config-epoch").and_then(|epoch| epoch.parse().ok());
        Ok((epoch.unwrap_or_default(), addr))
    }
}

// === addresses ===

fn connection_config(op_timeout: Duration) -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(op_timeout))
        .set_response_timeout(Some(op_timeout))
        .set_pipeline_buffer_size(COMMANDS_IN_LINE)
        .set_write_backpressure_boundary(WRITE_BUFFER)
}

fn connection_info(
    url: &str,
    tls: &StoreTls,
    timeout: Duration,
) -> Result<ConnectionInfo, RedisError> {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(5))
        .with_retries(2);
    // The library leaves Nagle's algorithm on, which costs half of a multiplexed connection.
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(timeout.max(Duration::from_secs(1)));
    let info = url.into_connection_info()?.set_tcp_settings(tcp);
    if *tls == StoreTls::default() {
        return Ok(info);
    }
    let client_tls = tls.client.as_ref().map(|(cert, key)| ClientTlsConfig {
        client_cert: cert.clone().into_bytes(),
        client_key: key.0.clone().into_bytes(),
    });
    let root_cert = tls.ca.as_ref().map(|ca| ca.clone().into_bytes());
    let client = Client::build_with_tls(info, TlsCertificates { client_tls, root_cert })?;
    Ok(client.get_connection_info().clone())
}

/// The same at another address.
fn at(info: &ConnectionInfo, host: String, port: u16) -> ConnectionInfo {
    let addr = match info.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    };
    info.clone().set_addr(addr)
}

fn host_and_port(info: &ConnectionInfo) -> Option<(String, u16)> {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some((host.clone(), *port))
        }
        _ => None,
    }
}
