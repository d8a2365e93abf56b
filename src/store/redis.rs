//! The store in Redis: the ledger's rules as scripts, so that a whole fleet counts together.
//!
//! Three kinds of connection: an ordered one that carries every command that writes ([`RedisLink`]), one for those
//! who only look, and one per subscription (`subscription`), which is never more than a hint.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use deadpool_redis::{
    Connection, Manager, Pool, PoolError, Runtime,
    redis::{
        AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, IntoConnectionInfo,
        Pipeline, RedisError, ServerErrorKind, Value,
        aio::MultiplexedConnection,
        io::tcp::{TcpSettings, socket2::TcpKeepalive},
    },
};
use tokio::{task::JoinSet, task::unconstrained};
use uuid::Uuid;

use super::{
    Acquire, AcquireReply, Acquired, BoxFuture, Call, Caller, Link, Push, Reply, SetSpec,
    SetStatus, SlotStore, StoreError,
    keys::Keys,
    scripts::{self, Writer},
};
use crate::config::{Secret, Store as Settings};

mod server;
mod subscription;

use self::server::Server;

/// The link, its successor while that is being opened, and one for those who look.
const CONNECTIONS: usize = 3;
/// Commands that may stand in line for the socket before a caller has to wait.
const COMMANDS_IN_LINE: usize = 1_024;
/// Bytes that the socket's buffer may hold before a flush is forced.
const WRITE_BUFFER: usize = 64 * 1_024;

/// Slots counted in Redis.
pub struct RedisStore {
    pool: Pool,
    client: Client,
    keys: Arc<Keys>,
    op_timeout: Duration,
    /// Dropping the store aborts them.
    subscriptions: Mutex<JoinSet<()>>,
}

impl RedisStore {
    /// A store in the Redis at `url`. Connects to nothing yet.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if the URL isn't one of a Redis.
    pub fn new(url: &Secret, settings: &Settings) -> Result<Arc<Self>, StoreError> {
        // The URL may hold a password, so no error may carry it.
        let wrong = |_| StoreError::Unavailable("the store's URL is not valid".to_owned());
        let info = connection_info(url.0.as_str(), settings.op_timeout).map_err(wrong)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(settings.op_timeout))
            .set_response_timeout(Some(settings.op_timeout))
            .set_pipeline_buffer_size(COMMANDS_IN_LINE)
            .set_write_backpressure_boundary(WRITE_BUFFER);
        let client = Client::open(info.clone()).map_err(wrong)?;
        let manager = Manager::new_with_config(info, config).map_err(wrong)?;
        let pool = Pool::builder(manager)
            .max_size(CONNECTIONS)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(settings.op_timeout))
            .create_timeout(Some(settings.op_timeout))
            .recycle_timeout(Some(settings.op_timeout))
            .build()
            .map_err(|_| StoreError::Unavailable("no pool of connections".to_owned()))?;
        Ok(Arc::new(Self {
            pool,
            client,
            keys: Arc::new(Keys::new(&settings.prefix)),
            op_timeout: settings.op_timeout,
            subscriptions: Mutex::default(),
        }))
    }

    async fn link(&self) -> Result<Arc<dyn Link>, StoreError> {
        let connection = self.pool.get().await?;
        let mut link = RedisLink {
            connection: Some(connection),
            keys: Arc::clone(&self.keys),
            run: String::new(),
        };
        let server = Server::greet(&mut link.handle()?).await?;
        link.run = server.run;
        Ok(Arc::new(link))
    }

    async fn look(&self, set: &SetSpec) -> Result<SetStatus, StoreError> {
        let mut connection = self.pool.get().await?;
        let mut pipeline = Pipeline::new();
        // Loaded along, since a pooled connection may lead to another server than before.
        let offset = scripts::load(&mut pipeline);
        pipeline.add_command(scripts::status(&self.keys, set));
        let mut answer = connection.send_packed_commands(&pipeline, offset, 1).await?;
        let reply = answer.pop().unwrap_or(Value::Nil).extract_error()?;
        scripts::read_status(reply)
    }
}

fn connection_info(url: &str, timeout: Duration) -> Result<ConnectionInfo, RedisError> {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(5))
        .with_retries(2);
    // The library leaves Nagle's algorithm on, which costs half of a multiplexed connection.
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(timeout.max(Duration::from_secs(1)));
    Ok(url.into_connection_info()?.set_tcp_settings(tcp))
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl SlotStore for RedisStore {
    fn open(&self) -> BoxFuture<'_, Result<Arc<dyn Link>, StoreError>> {
        Box::pin(self.link())
    }

    fn subscribe(&self, instance: Uuid, push: Push) {
        let channel = self.keys.channel(instance);
        let task = subscription::run(self.client.clone(), channel, self.op_timeout, push);
        self.subscriptions.lock().expect("nothing panics under this lock").spawn(task);
    }

    fn status<'a>(&'a self, set: &'a SetSpec) -> BoxFuture<'a, Result<SetStatus, StoreError>> {
        Box::pin(self.look(set))
    }
}

// === impl RedisLink ===

/// One connection, checked out of the pool for as long as the link lives and never given back to it.
struct RedisLink {
    /// None only while it is dropped.
    connection: Option<Connection>,
    keys: Arc<Keys>,
    /// Which run of the server this is.
    run: String,
}

impl RedisLink {
    fn handle(&self) -> Result<MultiplexedConnection, StoreError> {
        let connection = self.connection.as_deref().cloned();
        connection.ok_or_else(|| StoreError::Unavailable("the link is closed".to_owned()))
    }

    /// The commands of a call, in the order in which they are applied.
    fn commands(&self, caller: &Caller, call: &Call) -> Vec<Cmd> {
        let writer = Writer { keys: &self.keys, run: &self.run, caller };
        let plan = Turns::of(call);
        let of_kind =
            |rated| call.acquires.iter().filter(move |acquire| is_rated(acquire) == rated);
        let (none, releases) = (call.acquires[..0].iter(), &call.releases[..]);
        let first = match (plan.releases, plan.together) {
            (_, true) => Some(writer.turn(releases, of_kind(false), false)),
            (true, _) => Some(writer.turn(releases, none, false)),
            _ => None,
        };
        let heartbeat = call.heartbeat.as_ref().map(|heartbeat| writer.heartbeat(heartbeat));
        let others = plan.others && !plan.together;
        let others = others.then(|| writer.turn(&[], of_kind(false), false));
        let rated = plan.rated.then(|| writer.turn(&[], of_kind(true), true));
        [first, heartbeat, others, rated].into_iter().flatten().collect()
    }

    async fn apply(&self, commands: Vec<Cmd>, call: &Call) -> Result<Reply, StoreError> {
        let mut connection = self.handle()?;
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command(command);
        }
        let answers = connection.send_packed_commands(&pipeline, 0, pipeline.len()).await?;
        let mut answers = answers.into_iter();
        let mut next = || answers.next().unwrap_or(Value::Nil).extract_error();
        let mut reply = Reply::default();
        let plan = Turns::of(call);
        if plan.releases {
            let (releases, acquires) = scripts::read_turn(next()?)?;
            reply.releases = Some(releases);
            reply.acquires = plan.together.then_some(acquires);
        }
        if call.heartbeat.is_some() {
            reply.heartbeat = Some(scripts::read_heartbeat(next()?)?);
        }
        if plan.others && !plan.together {
            reply.acquires = Some(scripts::read_turn(next()?)?.1);
        }
        let rated = call.acquires.iter().filter(|acquire| is_rated(acquire)).count();
        if rated > 0 {
            let of_rated = match next() {
                // Only these keep more the more values of a key there are, so only these are refused.
                Err(error) if error.code() == Some("OOM") => AcquireReply {
                    stamp: reply
                        .acquires
                        .as_ref()
                        .map(|acquires| acquires.stamp)
                        .unwrap_or_default(),
                    outcomes: vec![Acquired::NoMemory; rated],
                    ..AcquireReply::default()
                },
                answer => scripts::read_turn(answer?)?.1,
            };
            reply.acquires = Some(merge(call, reply.acquires.take().unwrap_or_default(), of_rated));
        }
        Ok(reply)
    }
}

/// Which commands a call becomes.
struct Turns {
    releases: bool,
    /// Requests without rates.
    others: bool,
    rated: bool,
    /// Releases and requests without rates, in one command.
    together: bool,
}

impl Turns {
    fn of(call: &Call) -> Self {
        let releases = !call.releases.is_empty();
        let others = call.acquires.iter().any(|acquire| !is_rated(acquire));
        let rated = call.acquires.iter().any(is_rated);
        Self { releases, others, rated, together: call.is_one_turn() }
    }
}

fn is_rated(acquire: &Acquire) -> bool {
    !acquire.ask.rates.is_empty()
}

/// Puts the outcomes of the two scripts into the order of the call.
fn merge(call: &Call, others: AcquireReply, rated: AcquireReply) -> AcquireReply {
    let (mut of_others, mut of_rated) = (others.outcomes.into_iter(), rated.outcomes.into_iter());
    let mut next = |acquire| if is_rated(acquire) { of_rated.next() } else { of_others.next() };
    AcquireReply {
        outcomes: call.acquires.iter().filter_map(&mut next).collect(),
        stamp: if rated.stamp.now > 0 { rated.stamp } else { others.stamp },
        granted: [others.granted, rated.granted].concat(),
        fences: [others.fences, rated.fences].concat(),
        displaced: [others.displaced, rated.displaced].concat(),
    }
}

impl Link for RedisLink {
    /// The commands are written when the future is first polled, so a caller with several calls under way polls each
    /// once, in order, before it awaits any.
    ///
    /// Where Redis has forgotten the scripts (`SCRIPT FLUSH`) the call fails, and opening the next link loads them.
    /// To send it again here would put it behind calls that were made later.
    fn call<'a>(
        &'a self,
        caller: &'a Caller,
        call: &'a Call,
    ) -> BoxFuture<'a, Result<Reply, StoreError>> {
        let commands = self.commands(caller, call);
        // Unconstrained: a task whose budget is spent would else not get in line at the first poll.
        Box::pin(unconstrained(self.apply(commands, call)))
    }
}

impl Drop for RedisLink {
    fn drop(&mut self) {
        // A link is replaced when something is wrong with it, so its connection must not return to the pool.
        drop(self.connection.take().map(Connection::take));
    }
}

impl fmt::Debug for RedisLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLink").field("run", &self.run).finish_non_exhaustive()
    }
}

// === errors ===

impl From<RedisError> for StoreError {
    /// Only the server's own words, or the system's, go into the text: never the URL.
    fn from(error: RedisError) -> Self {
        if error.is_timeout() {
            return Self::Timeout;
        }
        let text = || match (error.code(), error.detail()) {
            (Some(code), Some(detail)) => format!("{code} {detail}"),
            (Some(code), None) => code.to_owned(),
            (None, Some(detail)) => format!("{}: {detail}", error.category()),
            (None, None) => error.category().to_owned(),
        };
        match error.kind() {
            ErrorKind::Io => Self::Unavailable(error.to_string()),
            ErrorKind::Parse
            | ErrorKind::UnexpectedReturnType
            | ErrorKind::Server(ServerErrorKind::ResponseError) => Self::BadReply(text()),
            _ => Self::Unavailable(text()),
        }
    }
}

impl From<PoolError> for StoreError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Timeout(_) => Self::Timeout,
            PoolError::Backend(error) => error.into(),
            other => Self::Unavailable(other.to_string()),
        }
    }
}
